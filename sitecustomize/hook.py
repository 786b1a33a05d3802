"""What the entry calls when a target is loaded, each time with only that module's own lock held.

Imported by the bundle's entry when the first target is executed, and not before. No lock of ours is held while anything
is imported, and everything that a decision needs is imported with this module.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from . import wrapping
from .changed_module import ChangedModule, part_of_import
from .context import to_stderr
from .outcomes import end_process
from .runtime import Runtime, guarded


def before(name: str, loader: Any, module: ModuleType | None) -> Any:
    """A target is about to be executed: what executes it, None where its loader does.

    `loader` is what would load the module without us, and what the module shows from now on; `module` is None where the
    loader makes it itself.
    """
    runtime = _the_runtime()
    if runtime is not None:
        runtime.will_execute(name)
    if module is not None:
        _show(module, loader)
    if runtime is None:
        return None
    guarded(runtime.before_execution, name, loader, _origin(name, loader, module))
    changed = runtime.changed(name)
    if changed is None:
        return None
    try:
        copied = copy.copy(loader)
        if module is None or copied is loader:
            raise TypeError("it cannot be copied")
        changed.substitute(copied)
    except Exception as error:  # somebody's own loader: it loads as it does
        guarded(runtime.out_of_reach, name, f"its loader cannot be made to load a changed source: {error}")
        return None
    _show(module, copied)
    return _Changed(runtime, changed, copied)


def after(module: ModuleType) -> None:
    """A target has been executed."""
    runtime = _the_runtime()
    if runtime is not None:
        guarded(runtime.after_execution, module)


def ended() -> None:
    """The outermost import of a thread has ended in which a target was executed, or came past us."""
    runtime = _the_runtime()
    if runtime is not None:
        guarded(runtime.look, True)


def program(name: str) -> None:
    """A target module is about to run as the program: `python -m`."""
    runtime = _the_runtime()
    if runtime is not None:
        guarded(runtime.program, name)


def finds(imports: dict[int, Any]) -> None:
    """The finder's own: the outermost imports that have not ended."""
    wrapping.under_way = imports


def changed(name: str, loader: Any) -> Any:
    """What has the source and the code of a module before it is executed, None where that is its loader."""
    runtime = _the_runtime()
    if runtime is None:
        return None
    guarded(runtime.before_execution, name, loader, _origin(name, loader, None))
    found = runtime.changed(name)
    return None if found is None else _Changed(runtime, found, loader)


def added(name: str) -> ModuleSpec | None:
    """The spec of a module that only a diff has, None where that diff does not apply."""
    runtime = _the_runtime()
    return None if runtime is None else runtime.added(name)


def is_gone(name: str) -> bool:
    """Whether it is decided that a module which a diff would add is not there. Waits for nothing."""
    runtime = _made["runtime"][0] if _made else None
    return bool(_made) and (runtime is None or runtime.is_gone(name))


def imported_before(names: list[str]) -> None:
    """Target modules that were imported before the entry ran."""
    runtime = _the_runtime()
    if runtime is not None:
        guarded(runtime.imported_before, names)


def armed_late(names: list[str]) -> None:
    """These target modules were imported before the guard ran the entry, and others may have taken from them."""
    runtime = _the_runtime()
    if runtime is not None:
        guarded(runtime.armed_late, names)


class _Changed:
    """Executes the changed source of one module, and has it."""

    def __init__(self, runtime: Runtime, changed: ChangedModule, loader: Any) -> None:
        self._runtime = runtime
        self._changed = changed
        self._loader = loader

    @part_of_import
    def exec_module(self, module: ModuleType) -> None:
        self._runtime.execute(module, self._loader, self._changed)

    def get_source(self, name: str) -> str:
        return self._changed.text

    def get_code(self, name: str) -> CodeType:
        return self._changed.code()


def _origin(name: str, loader: Any, module: ModuleType | None) -> str | None:
    """The file that the loader executes, where it says so."""
    spec = getattr(module, "__spec__", None)
    if spec is not None:
        return spec.origin if spec.has_location else None
    try:
        return str(loader.get_filename(name))
    except Exception:  # somebody's own loader
        return None


def _show(module: ModuleType, loader: Any) -> None:
    """Name the loader where a reader of the module finds it."""
    if getattr(module, "__spec__", None) is not None:
        module.__spec__.loader = loader  # type: ignore[union-attr]
    if getattr(module, "__loader__", None) is not None:
        module.__loader__ = loader


_made: dict[str, tuple[Runtime | None, str]] = {}


def _the_runtime() -> Runtime | None:
    """This process's runtime; None where the bundle itself is broken: one line says so.

    Two threads may each make one, so that neither waits for the other; the one that is kept serves.
    """
    if not _made:
        runtime, why = made = _attempt()
        if _made.setdefault("runtime", made) is made:
            if runtime is not None:
                runtime.begin()
            elif os.environ.get("LIVEPATCH", "").strip().lower() == "strict":
                end_process(why)
            else:
                to_stderr(why)
    return _made["runtime"][0]


def _attempt() -> tuple[Runtime | None, str]:
    """The runtime, or why there is none."""
    try:
        return _from_bundle(), ""
    except Exception as error:
        return None, f"the bundle cannot be used, nothing is patched: {type(error).__name__}: {error}"


def _from_bundle() -> Runtime:
    root = __name__.partition(".")[0]
    package = sys.modules[root]
    where = os.path.dirname(str(package.__file__))
    place = os.path.dirname(where)
    read = package.__spec__.loader.get_data  # type: ignore[union-attr]
    catalogue = json.loads(read(os.path.join(where, "catalogue.json")).decode("utf-8"))
    try:
        digest = "sha256:" + hashlib.sha256(read(os.path.join(place, "manifest.json"))).hexdigest()
    except OSError:
        digest = None
    about = {
        "bundle": os.path.dirname(place),
        "digest": digest,
        "wrapt": _form_of_wrapt(where) if catalogue["wrapt"] else "none",
    }
    return Runtime(catalogue, root, about)


def _form_of_wrapt(where: str) -> str:
    """Which form a patch gets that imports the bundle's wrapt: the interpreter takes the extension that names it.

    There is none for it where the bundle was made without, and it cannot load one from a zip file.
    """
    if os.environ.get("WRAPT_DISABLE_EXTENSIONS"):
        return "pure"
    stem = os.path.join(where, "vendor", "wrapt", "_wrappers")
    return "compiled" if any(os.path.isfile(stem + suffix) for suffix in EXTENSION_SUFFIXES) else "pure"
