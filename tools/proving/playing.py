"""One playing of a patch's proof: a process of its own, with nothing of the caller's but the code that is looked at."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_livepatch.sitecustomize.decision import variable

HERE, TESTS = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2] / "tests"
IN_PROCESS = HERE / "in_process.py"
# In a wheel they are beside this module, in a checkout where the tests have them.
STANDINS, DRIVERS = (
    packed if (packed := HERE / name).is_dir() else TESTS / below
    for name, below in (("standins", "standins"), ("driver", "releases/driver"))
)
SECONDS = 300.0
"""Longest time for one playing."""


@dataclass(frozen=True)
class Interpreter:
    """Whose code is proven: an interpreter, and what is before its own packages."""

    python: str
    path: Sequence[str] = ()
    seconds: float = SECONDS
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of each package, as it was looked at


@dataclass(frozen=True)
class Played:
    """What the cases came to: by its sentence what went wrong, None where nothing did. Or why they were not played."""

    cases: Mapping[str, str | None] = field(default_factory=dict)
    trouble: str | None = None
    patch: Mapping[str, Any] | None = None  # of the process's report, where it had a bundle
    modules: frozenset[str] = frozenset()  # of the packages, that its process imported

    @property
    def wrong(self) -> dict[str, str]:
        return {sentence: what for sentence, what in self.cases.items() if what is not None}


Play = Callable[[Path, str, Path | None], Played]
"""Plays a proof once: with a bundle, which may have the patch of this name, or without one, on the code as it is."""


def play(proof: Path, patch: str, bundle: Path | None, where: Interpreter) -> Played:
    """As `Play`, in a process that ends with this one, however that ends."""
    # A process that has left the group may still write there.
    with tempfile.TemporaryDirectory(prefix="livepatch-prove-", ignore_cleanup_errors=True) as temporary:
        work = Path(temporary)
        (work / "state").mkdir()
        environ = _environ(work, [*([str(bundle)] if bundle else []), *where.path], patch if bundle else "")
        command = [where.python, "-B", *words(proof, where.places)]
        status, said = _ended(command, environ, work, where.seconds)
        reports = [
            report for file in sorted((work / "state").glob("*.json")) if (report := _object(_read(file))) is not None
        ]
    results = [found for line in said["stdout"].splitlines() if (found := _object(line)) and "packages" in found]
    # What starts with the interpreter may print as well, and a forked child the result once more.
    if status is None or len(results) != 1:
        return Played(trouble=_why(status, said, where.seconds))
    return of(results[0], reports, patch, where.places)


def words(proof: Path, packages: Iterable[str]) -> list[str]:
    """The program that plays a proof, and its arguments."""
    return [*map(str, (IN_PROCESS, proof.resolve(), DRIVERS)), *packages]


def of(
    found: Mapping[str, Any], reports: Iterable[Mapping[str, Any]], patch: str, places: Mapping[str, Sequence[str]]
) -> Played:
    """What the program printed, and what its process reported of the patch."""
    for package, file in found["packages"].items():
        if file is None or not any(Path(file).is_relative_to(place) for place in places[package]):
            return Played(trouble=f"{package} was imported from {file}, which is not the one that was looked at")
    every = [one for report in reports for one in report.get("patches", ())]
    for one in every:  # diffs beside the patch: it is to be seen on what they make
        if one["name"] != patch and one["state"] in ("failed", "skipped"):
            return Played(trouble=f"{one['name']} is not applied ({one['reason']}): {one['detail']}")
    described = [one for one in every if one["name"] == patch]
    # Of several processes', the one where it was not applied, or not for long.
    worst = ("failed", "skipped", "applied", "armed")
    own = min(described, key=lambda one: worst.index(one["state"]), default=None)
    return Played(found.get("cases", {}), found.get("trouble"), own, frozenset(found.get("modules", ())))


_running: set[int] = set()
"""Leaders of the process groups that are being waited for."""


def end_all() -> None:
    """End what is still played: nobody waits for it any more."""
    for group in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _ended(
    command: Sequence[str], environ: Mapping[str, str], work: Path, seconds: float
) -> tuple[int | None, Mapping[str, str]]:
    """The status of a process (None: it was too slow, and was ended), and what it wrote. What it started has ended."""
    files = {name: work / name for name in ("stdout", "stderr")}
    with files["stdout"].open("wb") as stdout, files["stderr"].open("wb") as stderr:
        process = subprocess.Popen(
            command,
            env=environ,
            cwd=work,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        _running.add(process.pid)
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _running.discard(process.pid)
            assert process.stdin is not None
            process.stdin.close()
    return status, {name: _read(file) for name, file in files.items()}


def _read(file: Path) -> str:
    """What a process wrote there; nothing where it has removed it."""
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""


def _object(text: str) -> dict[str, Any] | None:
    """A JSON object; None of any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _why(status: int | None, said: Mapping[str, str], seconds: float) -> str:
    last = next((line.strip() for line in reversed(said["stderr"].splitlines()) if line.strip()), "it said nothing")
    ended = f"it was not done after {seconds:g} s" if status is None else f"its process ended with {status}"
    return f"{ended}: {last}"[:500]


def _environ(work: Path, path: Sequence[str], patch: str) -> dict[str, str]:
    """Nothing of the caller's that concerns vLLM, LMCache, Python or patches; a home and caches of its own."""
    theirs = ("LIVEPATCH", "PYTHON", "VLLM_", "LMCACHE_", "XDG_")
    switch = {variable(patch): "on"} if patch else {"LIVEPATCH": "off"}
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(theirs)},
        **switch,
        "LIVEPATCH_STATE_DIR": str(work / "state"),
        "LIVEPATCH_STATE_KEEP": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        # Packages may lie below the caller's home, which is not this process's.
        "PYTHONUSERBASE": os.environ.get("PYTHONUSERBASE") or os.path.expanduser("~/.local"),
        **{name: os.environ[name] for name in ("PYTHONNOUSERSITE",) if name in os.environ},
        "HOME": str(work),
        "TMPDIR": str(work),
        "XDG_CACHE_HOME": str(work / "cache"),
        "HF_HUB_OFFLINE": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(work / "cache"),
        "VLLM_CONFIG_ROOT": str(work / "config"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_TARGET_DEVICE": "cpu",
    }
