"""A patch's own code, of the bundle that this process started with, or not at all."""

from __future__ import annotations

import sys
from types import ModuleType

from .wrapping import ApplyError


def load(root: str, patch: str) -> ModuleType:
    """The patch's module. Raises ApplyError where that bundle has been replaced since and is no longer there."""
    _forget_where_parts_lay(sys.modules[root])
    name = f"{root}.patches.{patch.replace('-', '_')}.wrappers"
    try:
        __import__(name)  # not by importlib, of which another thread may be importing the other half
        return sys.modules[name]
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != root:
            raise
        replaced = "the bundle that this process started with was replaced and is no longer there: restart it"
        raise ApplyError("replaced", f"{replaced} ({error})") from error


def _forget_where_parts_lay(package: ModuleType) -> None:
    """In the zip file that the bundle is, if it is one: in another that has taken its place, other parts lie there."""
    archive = getattr(package.__loader__, "archive", None)
    for place, importer in list(sys.path_importer_cache.items()) if archive else ():
        if importer is not None and place.startswith(str(archive)):
            importer.invalidate_caches()  # type: ignore[attr-defined]
