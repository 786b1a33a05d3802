"""`doctor`: whether this interpreter, as it is started here, would be patched, and why not."""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from ...sitecustomize import cache, outcomes, report, settings
from ..errors import UserError
from . import edited
from .verdicts import Catalogue, Judged, here
from .verifying import Verified, verified

Finding = tuple[str, str]
"""OK, WARNING or FAILED, and a sentence."""
OK, WARNING, FAILED = "ok", "warning", "failed"
GUARD, ENTRY_POINT = "vllm-livepatch-guard", "livepatch"
"""The distribution that `generate --guard` writes, and what VLLM_PLUGINS calls it."""


class Check(NamedTuple):
    name: str
    result: str
    message: str


class Diagnosis(NamedTuple):
    digest: str | None  # of the bundle, None where it cannot be read
    checks: list[Check]
    packages: dict[str, str | None]
    patches: list[Judged]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.result == FAILED]


def examine(place: str, catalogue: Catalogue) -> Diagnosis:
    """All checks of the bundle at `place` in this process, started as those that it serves."""
    packages, judged = here(catalogue)
    found, bundle = _bundle(place, catalogue)
    checks = [
        Check("bundle", *bundle),
        Check("interpreter", *_interpreter()),
        Check("LIVEPATCH", *_mode(catalogue)),
        Check("path", *_path(place)),
        Check("loaded", *_loaded(place, found.generation if found else "")),
        *(Check("guard", *found) for found in _guard()),
        *(Check("imported earlier", *found) for found in _imported_earlier(catalogue)),
        Check("wrapt", *_wrapt()),
        Check("cache", *_cache()),
        Check("state directory", *(cache.in_time(_state) or (WARNING, "its file system does not answer"))),
        *(Check("edited files", *found) for found in _edited(catalogue)),
        *(Check("patches", *found) for found in _patches(packages, judged)),
    ]
    return Diagnosis(found.digest if found else None, checks, packages, judged)


def _bundle(place: str, catalogue: Catalogue) -> tuple[Verified | None, Finding]:
    """What it is, None where that cannot be read; and whether it is what its manifest says."""
    text = f"{place}, version {catalogue.version}"
    try:
        found = verified(Path(place))
    except (UserError, OSError) as error:
        return None, (FAILED, f"{text}: {error}")
    wrong = found.differences
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return found, (FAILED, f"{text} is not what generate wrote: {', '.join(wrong[:3])}{more}")
    return found, (OK, f"{text}, {found.digest}: the {found.compared} files of its manifest are all as written")


def _interpreter() -> Finding:
    text = f"{sys.executable}, Python {'.'.join(map(str, sys.version_info[:3]))}"
    flags = {
        "-I": sys.flags.isolated,
        "-E": sys.flags.ignore_environment and not sys.flags.isolated,
        "-S": sys.flags.no_site,
    }
    given = [flag for flag, value in flags.items() if value]
    if not given:
        return OK, text
    means = "no sitecustomize is run" if given == ["-S"] else "PYTHONPATH is not looked at"
    return FAILED, f"{text} was started with {' '.join(given)}: {means}"


def _mode(catalogue: Catalogue) -> Finding:
    environment = settings.read(catalogue.patches, os.environ)
    asked = settings.changed_settings(catalogue.patches, environment)
    given = {**asked["toggles"], **{name: str(values) for name, values in asked["options"].items()}}
    text = f"{environment.mode}" + "".join(f", {name} {value}" for name, value in given.items())
    troubles = "; ".join((*environment.errors, *environment.notes))
    if environment.mode == "off":
        return FAILED, troubles or "LIVEPATCH is off: nothing is patched"
    if not troubles:
        return OK, text
    if environment.mode == "strict":
        return FAILED, f"under strict this ends every process that imports a target: {troubles}"
    return WARNING, f"{text}; {troubles}"


def _path(place: str) -> Finding:
    """Who is called `sitecustomize`, in the order of the path that `site` looked along."""
    named = os.environ.get("PYTHONPATH", "")
    found = [origin for entry in _site_path() if (origin := _sitecustomize_in(entry)) is not None]
    own = os.path.join(place, "sitecustomize.py")
    first = next((number for number, origin in enumerate(found) if _same(origin, own)), None)
    if first is None:
        if sys.flags.ignore_environment or not named:
            return FAILED, "PYTHONPATH is ignored" if named else "PYTHONPATH is not set"
        return FAILED, f"PYTHONPATH is {named!r}, and does not name {place}"
    after = f"; {', '.join(found[first + 1 :])} runs after it" if found[first + 1 :] else ""
    naming = [entry for entry in named.split(os.pathsep) if _same(entry or os.curdir, place)] if named else []
    if naming and not any(map(os.path.isabs, naming)):
        return FAILED, (
            f"PYTHONPATH names the bundle as {naming[0]!r}, which a process that is started in another folder does not "
            f"find: name {os.path.abspath(place)}"
        )
    if first == 0:
        return OK, f"{own} is the first sitecustomize{after}"
    before = ", ".join(found[:first])
    if _entry() is None:
        return FAILED, f"{before} comes before {own} and does not run the next one: name {place} first in PYTHONPATH"
    return WARNING, f"{before} comes before {own}, and runs the next one{after}"


def _site_path() -> list[str]:
    """`sys.path` without what the start of this program put in front of it."""
    return [entry for entry in sys.path[1:] if entry]


def _sitecustomize_in(entry: str) -> str | None:
    spec = PathFinder.find_spec("sitecustomize", [entry])
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), entry)


def _loaded(place: str, generation: str) -> Finding:
    serving = _entry()
    if serving is None:
        try:
            with open(os.path.join(place, "sitecustomize.py"), "rb"):
                pass
        except NotADirectoryError:
            pass  # a zip file
        except OSError as error:
            return FAILED, f"the bundle was not loaded in this process: {error}"
        return FAILED, "the bundle was not loaded in this process"
    where = os.path.dirname(os.path.abspath(str(serving.get("__file__", ""))))
    if not _same(where, place):
        return FAILED, f"another bundle serves this process: {where}"
    armed = str(serving.get("GENERATION", ""))
    if generation not in ("", armed):
        kept = serving.get("__cached__", "")
        return FAILED, (
            f"what was loaded is the entry of {armed}, and the bundle's is of {generation}: Python took "
            f"{kept or 'bytecode'} for it, which an earlier bundle left; remove it, and replace bundles by `generate`"
        )
    beside = outcomes.bundles_beside()
    if beside:
        return FAILED, "; ".join(beside)
    return OK, "the bundle was loaded in this process"


def _entry() -> dict[str, Any] | None:
    """The names of the bundle's entry whose finder is in place here."""
    for finder in sys.meta_path:
        if getattr(finder, "__name__", "") == "LivepatchFinder":
            find_spec: Any = getattr(finder, "find_spec", None)
            if isinstance(find_spec, types.FunctionType):
                return find_spec.__globals__
    return None


def _imported_earlier(catalogue: Catalogue) -> Iterator[Finding]:
    """Targets that a .pth file, or another sitecustomize, has imported: what became of their patches is known."""
    targets = {module for patch in catalogue.patches for module in patch.modules}
    earlier = sorted(targets & sys.modules.keys())
    if not earlier:
        yield OK, "no target was imported before the program began"
        return
    yield WARNING, f"imported before the program began: {', '.join(earlier)}"
    hook = sys.modules.get(f"{__name__.partition('.')[0]}.sitecustomize.hook")
    runtime = getattr(hook, "_made", {}).get("runtime", (None,))[0]
    for state in () if runtime is None else runtime.patches.all:
        if state.state == "failed":
            yield FAILED, f"{state.patch.name} failed here ({state.reason}): {state.detail}"


def _guard() -> Iterator[Finding]:
    """Whether vLLM would run the guard, where it is installed."""
    guard = GUARD.replace("-", "_")
    if PathFinder.find_spec(guard, _site_path()) is None:
        return
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is None or ENTRY_POINT in chosen.split(","):
        yield OK, f"{GUARD} is installed, and vLLM runs it in each of its processes"
    else:
        yield WARNING, f"VLLM_PLUGINS={chosen} leaves {GUARD} out: vLLM will not run it; add {ENTRY_POINT}"


def _wrapt() -> Finding:
    """Patches are plain functions; wrapt is for those of others, and in bundles that have such a patch."""
    root = f"{__name__.partition('.')[0]}.vendor.wrapt"
    try:
        module = importlib.import_module(root)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == root.rpartition(".")[0]:
            return OK, "not in this bundle: no patch asks for it"
        return WARNING, f"the bundle's copy cannot be imported: {type(error).__name__}: {error}"
    compiled = f"{root}._wrappers" in sys.modules
    return OK, f"{module.__version__}, {'compiled' if compiled else 'in pure Python: a call through it takes longer'}"


def _cache() -> Finding:
    found = cache.in_time(cache.directory, os.environ)
    if found is None:
        return WARNING, "no cache directory can be used: each process parses again what the patches name"
    return OK, found


def _state() -> Finding:
    """Nothing is made there: a process makes it when it has something to report."""
    try:
        where = report.directory(os.environ)
        if os.path.isdir(where):
            os.close(report.opened(os.environ))
            above = where
        else:
            above = os.path.dirname(where)
            while not os.path.lexists(above):
                above = os.path.dirname(above)
    except OSError as error:
        return WARNING, f"no report can be left in {error.filename}: {error.strerror or error}"
    except Exception as error:  # a damaged bundle's, which is found by itself; a thread would show a traceback
        return WARNING, f"no report can be left: {error}"
    if not os.path.isdir(above) or not os.access(above, os.W_OK | os.X_OK):
        return WARNING, f"no report can be left in {where}: {above} cannot be written to"
    return OK, where


def _edited(catalogue: Catalogue) -> Iterator[Finding]:
    """Installed files that a recipe edits: a patch refuses such code, and says no more than that it differs."""
    looked = cache.in_time(edited.look, catalogue.patches)
    if looked is None:
        yield WARNING, "the file system of the packages does not answer: whether a recipe edits them is not known"
    elif looked.text:
        yield (WARNING if looked.edited else OK), looked.text


def _patches(packages: dict[str, str | None], judged: list[Judged]) -> Iterator[Finding]:
    if not packages:
        names = sorted({answer.patch.package for answer in judged})
        yield FAILED, f"none of the packages that the patches are for is installed here ({', '.join(names)})"
        return
    found = ", ".join(f"{name} {release or 'of unknown release'}" for name, release in packages.items())
    applied = [answer.patch.name for answer in judged if answer.decision.apply]
    if applied:
        would = ", ".join(applied)
    elif any(answer.decision.verdict == "needed" for answer in judged):
        would = "none: those that are needed here are off"
    else:
        would = "none, since none is needed"
    yield OK, f"{found}: would apply {would}"
    for answer in judged:
        if answer.blocked:
            yield (
                FAILED,
                f"{answer.patch.name} would not be applied ({answer.decision.reason}): {answer.decision.detail}",
            )


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
