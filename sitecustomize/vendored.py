"""The bundle's copy of wrapt, `from ...vendor import wrapt` in a patch: nobody else's, and nobody else gets it.

`generate` writes this as the package that holds the copy. wrapt's compiled form, as it begins, imports
`wrapt.exceptions` by that name, which here is another's or is not there: for that moment it is the copy's own.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder

_NAME, _ASKED = f"{__name__}.wrapt.exceptions", "wrapt.exceptions"
_spec = PathFinder.find_spec(_NAME, [f"{place}/wrapt" for place in sys.modules[__name__].__path__])
assert _spec is not None
assert _spec.loader is not None
_exceptions = sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_exceptions)
_theirs = sys.modules.get(_ASKED)
sys.modules[_ASKED] = _exceptions
try:
    from . import wrapt
finally:
    if _theirs is None:
        del sys.modules[_ASKED]
    else:
        sys.modules[_ASKED] = _theirs
wrapt.exceptions = _exceptions
