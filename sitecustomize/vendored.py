"""The bundle's copy of wrapt, `from ...vendor import wrapt` in a patch: nobody else's, and nobody else gets it.

`generate` writes this as the package that holds the copy. wrapt's compiled form, as it begins, imports
`wrapt.exceptions` by that name, which here is another's or is not there. So it is loaded here, and given the copy's
own: PyImport_Import asks the `__import__` of the frame that it is called in, and takes the module from `sys.modules`.
"""

import _imp
import builtins
import contextlib
import importlib.util
import os
import sys
from importlib.machinery import ExtensionFileLoader, PathFinder

_ASKED = "wrapt.exceptions"
_PLACES = [os.path.join(place, "wrapt") for place in sys.modules[__name__].__path__]


def _exceptions():
    name = f"{__name__}.wrapt.exceptions"
    spec = PathFinder.find_spec(name, _PLACES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


def _load_compiled(exceptions):
    name = f"{__name__}.wrapt._wrappers"
    spec = PathFinder.find_spec(name, _PLACES)
    if spec is None or type(spec.loader) is not ExtensionFileLoader or os.environ.get("WRAPT_DISABLE_EXTENSIONS"):
        return

    def answer(asked, *rest):
        return exceptions if asked == _ASKED else builtins.__import__(asked, *rest)

    module = _imp.create_dynamic(spec)
    frame = {"__builtins__": {"__import__": answer}, "run": _imp.exec_dynamic, "module": module}
    theirs = sys.modules.get(_ASKED)
    sys.modules[_ASKED] = exceptions
    try:
        exec("run(module)", frame)
    finally:
        if theirs is None:
            del sys.modules[_ASKED]
        else:
            sys.modules[_ASKED] = theirs
    sys.modules[name] = module


_own = _exceptions()
with contextlib.suppress(ImportError):  # another C library, say: wrapt goes on without
    _load_compiled(_own)
from . import wrapt  # noqa: E402

wrapt.exceptions = _own
