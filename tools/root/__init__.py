"""vllm-livepatch: patches for vLLM and LMCache, applied as their modules are imported.

Five functions for projects that start vLLM themselves (docs/frameworks.md). To import this needs the standard library
alone; to make a bundle, what vllm-livepatch was installed with. What cannot be done raises
`vllm_livepatch.tools.errors.UserError`, with one line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["applied", "arm", "bundle", "report", "require"]


def bundle(
    out: str | os.PathLike[str] | None = None,
    *,
    patches: Sequence[str] = (),
    patch_dirs: Iterable[str | os.PathLike[str]] = (),
    installed: bool = False,
) -> Path:
    """Write a bundle, by default into the user's cache, and return its directory: PYTHONPATH is to name it first.

    `patches`: only these; all where none is named. `patch_dirs`: directories of further patch folders. `installed`:
    also the patches that installed distributions bring. Raises UserError.
    """
    from pathlib import Path

    from vllm_livepatch.tools.bundles import bundle as made
    from vllm_livepatch.tools.bundles import catalogue, extensions, others, placing

    places = [*map(Path, patch_dirs), *(others.installed() if installed else ())]
    entries = catalogue.choose(catalogue.load(places), patches)
    forms = extensions.at_hand(extensions.chosen()) if made.asks_for_wrapt(entries) else {}
    files = made.contents(entries, forms)
    if out is None:
        return made.cached(files)
    placing.write_directory(files, Path(out))
    return Path(out)


def arm(place: str | os.PathLike[str] | None = None) -> bool:
    """Have a bundle serve this process from now on, and those that it starts; return whether one does.

    To be called before vLLM or LMCache is imported: what has been imported by then is patched where that still can be
    done, and refused (`late`) where not. `place` is a bundle's directory, by default `bundle()`. Where a bundle serves
    already, nothing changes; with LIVEPATCH=off none does. Raises UserError where `place` is no bundle.
    """
    from vllm_livepatch.sitecustomize import vllm_plugin
    from vllm_livepatch.tools.errors import UserError

    if vllm_plugin.is_armed():
        return True
    where = os.path.abspath(os.fspath(bundle() if place is None else place))
    if not vllm_plugin.is_bundle(where):
        raise UserError(f"{where} is not a bundle: `vllm-livepatch generate` makes one")
    if vllm_plugin.arm(where):
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{where}{os.pathsep}{before}" if before else where
    return vllm_plugin.is_armed()


def report() -> dict[str, Any]:
    """Return what became of the patches in this process.

    `armed`: whether a bundle serves it; `bundle`: where that is; `packages`: releases, by package, as far as they were
    looked at; `patches`: for each its `name`, `version`, `state`, `reason`, `detail`, `verdict`, `targets` and
    `counters`, as `status --json` has them. No patch is listed before the first target is imported.
    """
    entry = _entry()
    runtime = _runtime()
    return {
        "armed": entry is not None,
        "bundle": None if entry is None else str(entry["HERE"]),
        "packages": {} if runtime is None else dict(runtime.patches.packages),
        "patches": [] if runtime is None else [state.described() for state in runtime.patches.all],
    }


def applied(name: str) -> bool:
    """Return whether a patch is applied in this process: false also where its module was not imported yet."""
    return any(patch["name"] == name and patch["state"] == "applied" for patch in report()["patches"])


def require(name: str) -> None:
    """Raise UserError unless a patch is applied here, or waits for its module to be imported, as `status --require`."""
    from vllm_livepatch.tools.errors import UserError

    found = report()
    if not found["armed"]:
        raise UserError(f"{name} is required, and no bundle serves this process")
    known = {patch["name"]: patch for patch in found["patches"]} or dict.fromkeys(_named(found["bundle"]))
    if name not in known:
        raise UserError(f"{name} is required, and is not in {found['bundle']}")
    patch = known[name]
    if patch is not None and patch["state"] not in ("applied", "armed"):
        raise UserError(f"{name} is required, and is {patch['state']} here ({patch['reason']}): {patch['detail']}")


def _entry() -> dict[str, Any] | None:
    """The names of the entry of the bundle that serves this process."""
    for finder in sys.meta_path:
        if getattr(finder, "__name__", "") == "LivepatchFinder":
            names: dict[str, Any] | None = getattr(finder.find_spec, "__globals__", None)
            return names
    return None


def _runtime() -> Any:
    hook = sys.modules.get("_vllm_livepatch.sitecustomize.hook")
    return getattr(hook, "_made", {}).get("runtime", (None,))[0]


def _named(place: str) -> list[str]:
    """The patches of a bundle. It may be a zip file."""
    import json
    import zipfile

    name = "manifest.json"
    if os.path.isfile(place):
        with zipfile.ZipFile(place) as archive:
            text = archive.read(name)
    else:
        with open(os.path.join(place, name), "rb") as file:
            text = file.read()
    return list(json.loads(text)["patches"])
