"""vllm-livepatch: patches for vLLM and LMCache, applied as their modules are imported.

Five functions for projects that start vLLM themselves (docs/frameworks.md). To import this needs the standard library
alone; to make a bundle, what vllm-livepatch was installed with. What cannot be done raises
`vllm_livepatch.tools.errors.UserError`, with one line.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["applied", "arm", "bundle", "report", "require"]

_arming = threading.Lock()


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

    To be called before vLLM or LMCache is imported: patches of what has been imported by then are refused (`late`).
    `place` is a bundle's directory, by default `bundle()`, which has our own patches alone. Where that bundle serves
    already, nothing changes; with LIVEPATCH=off none does. Raises UserError where `place` is no bundle, and where
    another bundle serves.
    """
    from pathlib import Path

    from vllm_livepatch.sitecustomize import vllm_plugin
    from vllm_livepatch.tools.errors import UserError
    from vllm_livepatch.tools.in_bundle.verifying import verified

    with _arming:
        entry = _entry()
        where = os.path.abspath(os.fspath(place if place is not None else entry["HERE"] if entry else bundle()))
        if os.pathsep in where:
            raise UserError(f"{where} cannot stand in PYTHONPATH: it has a {os.pathsep!r}")
        found = verified(Path(where))
        if found.differences:
            raise UserError(f"{where} is not what generate wrote: {found.differences[0]}")
        if entry is not None and vllm_plugin.generation_of(where) != entry["GENERATION"]:
            raise UserError(f"{entry['HERE']} serves this process already, and {where} cannot: make one bundle of both")
        if entry is None and not vllm_plugin.arm(where):
            return False
        before = os.environ.get("PYTHONPATH", "")
        if where not in before.split(os.pathsep):
            os.environ["PYTHONPATH"] = f"{where}{os.pathsep}{before}" if before else where
        return True


def report() -> dict[str, Any]:
    """Return what became of the patches in this process.

    `armed`: whether a bundle serves it; `bundle`: where that is; `packages`: releases, by package, as far as they were
    looked at; `patches`: for each its `name`, `version`, `state`, `reason`, `detail`, `verdict`, `targets` and
    `counters`, as `status --json` has them. No patch is listed before the first target is imported.
    """
    entry = _entry()
    runtime = _made().get("runtime", (None,))[0]
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
    """Raise UserError unless a patch is applied here, or waits for its module to be imported, as `status --require`.

    `name` may end in `@` and the least version of the patch.
    """
    from vllm_livepatch.tools.errors import UserError

    asked, _, version = name.replace("_", "-").partition("@")
    found = report()
    if not found["armed"]:
        raise UserError(f"{asked} is required, and no bundle serves this process")
    why = _made().get("runtime", (None, ""))[1]
    if why:
        raise UserError(f"{asked} is required, and {why}")
    known = {patch["name"]: patch for patch in found["patches"]} or _named(found["bundle"])
    if asked not in known:
        raise UserError(f"{asked} is required, and is not in {found['bundle']}")
    patch = known[asked]
    if patch.get("state", "armed") not in ("applied", "armed"):
        raise UserError(f"{asked} is required, and is {patch['state']} here ({patch['reason']}): {patch['detail']}")
    if not found["patches"] and _is_gone(patch["facts"]):
        module = patch["facts"]["targets"][0].partition(":")[0]
        raise UserError(f"{asked} is required, and {patch['facts']['package']} has no {module} here")
    if version and not (version.isdecimal() and (patch["version"] or 0) >= int(version)):
        raise UserError(f"{name} is required, and {asked} is of version {patch['version'] or 'unknown'}")


def _entry() -> dict[str, Any] | None:
    """The names of the entry of the bundle that serves this process."""
    for finder in sys.meta_path:
        if getattr(finder, "__name__", "") == "LivepatchFinder":
            names: dict[str, Any] | None = getattr(finder.find_spec, "__globals__", None)
            return names
    return None


def _made() -> dict[str, tuple[Any, str]]:
    """The runtime of this process, once a target was imported, or why there is none."""
    made: dict[str, tuple[Any, str]] = getattr(sys.modules.get("_vllm_livepatch.sitecustomize.hook"), "_made", {})
    return made


def _is_gone(facts: dict[str, Any]) -> bool:
    """Whether the patched package is imported and has none of the modules with a target: no import will name them."""
    from vllm_livepatch.sitecustomize.installed import Process

    if facts["package"] not in sys.modules:
        return False
    modules = {target.partition(":")[0] for target in facts["targets"]}
    return sys.modules.keys().isdisjoint(modules) and not any(map(Process().origin, modules))


def _named(place: str) -> dict[str, dict[str, Any]]:
    """The patches of a bundle, by name. It may be a zip file. Raises UserError."""
    import json
    import zipfile

    from vllm_livepatch.sitecustomize.vllm_plugin import generation_of
    from vllm_livepatch.tools.errors import UserError

    name = f"{generation_of(place)}/_vllm_livepatch/catalogue.json"
    try:
        if os.path.isfile(place):
            with zipfile.ZipFile(place) as archive:
                text = archive.read(name)
        else:
            with open(os.path.join(place, name), "rb") as file:
                text = file.read()
        patches = json.loads(text)["patches"]
        return {key: {"version": facts.get("version"), "facts": facts} for key, facts in patches.items()}
    except (OSError, ValueError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"{place} serves this process, and cannot be read: {error}") from error
