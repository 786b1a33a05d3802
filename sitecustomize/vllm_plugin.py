"""Sees in every vLLM process that a bundle is armed; under LIVEPATCH=strict it ends one in which none can be.

`generate --guard` writes this as the one module of a distribution whose entry point in vLLM's own group of plugins vLLM
runs in each of its processes, whether or not PYTHONPATH, and with it the bundle, has reached that process.

Where PYTHONPATH names a bundle that did not run (another `sitecustomize` came first, or `-I`, `-E`, `-S`), it is armed
late. When vLLM runs its plugins, some of what patches replace has been imported (the engine core's own module always,
the scheduler in newer releases), and others may have taken it from there: those patches are left out, and
the report says so.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import zipfile
from importlib.machinery import PathFinder

from .context import line
from .report import ProcessReport

VERSION = ""  # generate: the version of what it writes
MODULES: dict[str, list[str]] = {}  # generate: each patch, and the modules that it is about
DEFAULT: list[str] = []  # generate: the patches that apply by themselves, wherever they are needed
NAME = "livepatch"
"""Of the entry point: what VLLM_PLUGINS must name, where it is set."""
ON = ("on", "force", "1", "true", "yes", "enabled")
OFF = ("off", "0", "false", "no", "disabled")
ARMED = ("auto", "strict", "1", "true", "yes", "on", "enabled")
"""The values of LIVEPATCH that are not off, as sitecustomize/settings.py has them."""
EXIT_STRICT = 78
ENTRY_NAME = "_vllm_livepatch_late"
"""By which a bundle's entry knows that it runs late."""


def check() -> None:
    """The entry point. Where no bundle is armed: one is armed late, or a line on stderr and a report, or the end."""
    mode = _mode()
    if mode in OFF or is_armed():
        return
    if mode not in ARMED:
        line(f"{_unknown()}, and no bundle is armed in this process (pid {os.getpid()})")
        return
    imported = sorted({module for modules in MODULES.values() for module in modules if module in sys.modules})
    before = f"; {len(imported)} of its targets' modules are imported already" if imported else ""
    why = why_not()
    place = next(iter(_bundles()), None)
    if place is not None and arm(place):
        line(f"the bundle was armed late, by the guard: {why}{before} (pid {os.getpid()})")
        return
    problem = f"no bundle is armed in this process, nothing is patched: {why}{before}"
    if mode == "strict":
        line(f"LIVEPATCH=strict: {problem}")
        os._exit(EXIT_STRICT)  # an exception would be vLLM's to catch
    line(f"{problem} (pid {os.getpid()})")
    report = ProcessReport(os.environ, {"bundle": "", "version": VERSION, "digest": None, "settings": {}})
    vllm = sys.modules.get("vllm")
    if os.environ.get("LIVEPATCH_STATE_KEEP", "").strip().lower() not in ON:
        atexit.register(report.remove)
    report.write({"vllm": getattr(vllm, "__version__", None)}, [_described(name, problem) for name in sorted(MODULES)])


def is_armed() -> bool:
    """Whether a bundle's entry has run in this process."""
    return any(getattr(finder, "__name__", "") == "LivepatchFinder" for finder in sys.meta_path)


def why_not() -> str:
    """Why no bundle is armed here, as far as is known."""
    if not (3, 10) <= sys.version_info[:2] <= (3, 14):
        return f"bundles do not serve Python {sys.version_info[0]}.{sys.version_info[1]}"
    if sys.flags.isolated or sys.flags.ignore_environment:
        return "Python was started with -I or -E, which leave PYTHONPATH out"
    if sys.flags.no_site:
        return "Python was started with -S, which leaves sitecustomize out"
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    if not places:
        return "PYTHONPATH is not set in its environment"
    found = _bundles()
    if not found:
        return f"PYTHONPATH={os.pathsep.join(places)} names no bundle (not mounted, empty, or not to be read)"
    other = str(getattr(sys.modules.get("sitecustomize"), "__file__", ""))
    if other and os.path.dirname(other) != os.path.abspath(found[0]):
        return f"{other} ran as sitecustomize in the place of {found[0]}'s"
    return f"{found[0]} is a bundle, and its sitecustomize did not run"


def main() -> None:
    """`python -m vllm_livepatch_guard`: the same for this interpreter, and whether vLLM would ask. Exit 1: it would not
    be patched, or nobody would say so."""
    chosen = os.environ.get("VLLM_PLUGINS")
    off, known = _mode() in OFF, _mode() in (*OFF, *ARMED)
    enabled = chosen is None or NAME in chosen.split(",")
    if off:
        print("LIVEPATCH turns it off")
    elif not known:
        print(_unknown())
    else:
        print("a bundle is armed" if is_armed() else f"no bundle is armed: {why_not()}")
    if not enabled:
        print(f"VLLM_PLUGINS={chosen} leaves the guard out: vLLM will not run it; add {NAME}")
    sys.exit(0 if enabled and known and (off or is_armed()) else 1)


def _mode() -> str:
    return os.environ.get("LIVEPATCH", "").strip().lower() or "auto"


def _unknown() -> str:
    """As the bundle says it, where one is armed."""
    return f"LIVEPATCH={os.environ['LIVEPATCH']!r} is none of auto, off, strict; it counts as off"


def _bundles() -> list[str]:
    """Those that PYTHONPATH names, whether or not Python looked at it."""
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [place for place in places if place and is_bundle(place)]


def arm(place: str) -> bool:
    """Run a bundle's entry in a process that began without it: whether it serves now."""
    sys.path_importer_cache.pop(place, None)  # PYTHONPATH may have named it before it was there
    try:
        spec = PathFinder.find_spec("sitecustomize", [place])
        code = spec.loader.get_code("sitecustomize")  # type: ignore[union-attr]
        exec(code, {"__name__": ENTRY_NAME, "__file__": spec.origin})  # type: ignore[union-attr]
    except Exception as error:  # a damaged bundle must not end the engine
        line(f"{place} cannot be armed: {type(error).__name__}: {error}")
    return is_armed()


def is_bundle(place: str) -> bool:
    return bool(generation_of(place))


def generation_of(place: str) -> str:
    """The folder that holds a bundle's content, by its manifest; empty where `place` is no bundle."""
    try:
        if os.path.isfile(place):
            with zipfile.ZipFile(place) as archive:
                names, manifest = archive.namelist(), archive.read("manifest.json")
            if "sitecustomize.py" not in names:
                return ""
        else:
            files = [os.path.join(place, name) for name in ("sitecustomize.py", "manifest.json")]
            if not all(map(os.path.isfile, files)):  # a pipe would be waited for
                return ""
            with open(files[1], "rb") as file:
                manifest = file.read()
        return str(json.loads(manifest).get("generation", "_vllm_livepatch"))
    except Exception:  # whatever else lies on somebody's path: a damaged archive, text nested too deeply
        return ""


def _described(name: str, problem: str) -> dict[str, object]:
    """A patch as `status` shows it."""
    before = [module for module in MODULES[name] if module in sys.modules]
    detail = f"{problem.partition(';')[0]}; imported before: {', '.join(before) or 'none of its modules'}"
    toggle = os.environ.get(f"LIVEPATCH_{name.upper().replace('-', '_')}", "").strip().lower()
    wanted = toggle in ON or (name in DEFAULT and toggle not in OFF)
    state = {"state": "skipped", "reason": "late" if wanted else "optional", "detail": detail, "verdict": None}
    return {"name": name, **state, "targets": [], "counters": {}}
