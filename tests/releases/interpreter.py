"""Interpreters for the drivers: forks of one that has imported what all releases import (see driver/warm.py)."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import executed
from vllm_livepatch.tools.releases import registry, sources

HERE = Path(__file__).parent
DRIVERS = HERE / "driver"
STANDINS = HERE.parent / "standins"
SECONDS = 300
"""Longest time for one driver, and for warming up."""

WARMED_BY = (
    "vllm.v1.core.sched.async_scheduler",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "lmcache.v1.multiprocess.server",
)
"""What to warm up for, in the newest release and every third before: the others' third-party imports are nearly the same."""


class Interpreter:
    """Runs drivers, one at a time, each in a process of its own. Close it when done."""

    def __init__(self, python: Path, directory: Path) -> None:
        lmcache = sources.site_packages("lmcache", registry.pins("lmcache")[-1].version)
        some = [sources.site_packages("vllm", pin.version) for pin in registry.pins("vllm")[::-3]]
        paths = json.dumps([[str(vllm), str(lmcache)] for vllm in some])
        self._log = directory / "warm.log"
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                [str(python), str(DRIVERS / "warm.py"), paths, *WARMED_BY],
                env=_environ({}, directory),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
            )
        assert self._answer(SECONDS) == "ready", self._log.read_text(encoding="utf-8")[-4000:]

    def run(
        self,
        driver: str,
        releases: Mapping[str, str],
        work: Path,
        *,
        bundle: Path | None = None,
        environ: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        path: Sequence[Path] = (),
        with_stock: bool = False,
    ) -> dict[str, Any]:
        """Run driver/`driver`.py in `work` and return the JSON that it prints; fails the test where there is none.

        `releases` is what to put on the search path, version by package, behind the bundle if there is one and before
        `path`. The driver's object says under each package's name which file that was imported from. `with_stock`: the
        driver plays the release's own code too, unwrapped, in the same process, and the test looks at what came of it.
        """
        given = {package: sources.site_packages(package, version) for package, version in releases.items()}
        searched = [*([bundle] if bundle else []), *given.values(), *path]
        job = {
            "argv": [str(DRIVERS / f"{driver}.py"), *arguments],
            "environ": _environ({**(environ or {}), "PYTHONPATH": _joined(searched)}, work),
            "cwd": str(work),
            "path": [str(entry) for entry in searched],
            "stdout": str(work / "stdout"),
            "stderr": str(work / "stderr"),
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        child = int(self._answer(SECONDS) or "0")
        status = self._answer(SECONDS)
        if status is None:
            os.killpg(child, signal.SIGKILL)
            self._answer(SECONDS)
        said = (work / "stderr").read_text(encoding="utf-8", errors="replace")
        assert status == "0", f"{driver} on {dict(releases)} ended with {status or 'a time-out'}:\n{said[-4000:]}"
        print(said)  # shown by pytest where a comparison fails
        result: dict[str, Any] = json.loads((work / "stdout").read_text(encoding="utf-8"))
        for package, place in given.items():
            assert Path(result[package]).is_relative_to(place), f"another {package} than the release's was driven"
        # A package that was not put on the path is the engine environment's: of the newest pinned release.
        own = {name: registry.pins(name)[-1].version for name in ("lmcache",) if result.get(name) and name not in given}
        executed.note(driver, {**releases, **own}, work / "state" if bundle else None, with_stock)
        return result

    def close(self) -> None:
        """End the server; what it forked has ended."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(SECONDS)

    def _answer(self, seconds: float) -> str | None:
        """The server's next line, None where there is none in time; each line is one write."""
        assert self._server.stdout is not None
        ready, _, _ = select.select([self._server.stdout], [], [], seconds)
        return self._server.stdout.readline().strip() if ready else None


def reported(work: Path, patch: str) -> dict[str, Any]:
    """What the bundle reported of a patch in the one process that was run in `work`."""
    (file,) = (work / "state").glob("*.json")
    return read(file, patch)


def read(file: Path, patch: str) -> dict[str, Any]:
    """What one process's report says of a patch."""
    (found,) = (entry for entry in json.loads(file.read_text(encoding="utf-8"))["patches"] if entry["name"] == patch)
    return dict(found)


def _joined(path: Sequence[Path]) -> str:
    return os.pathsep.join(map(str, path))


def _environ(variables: Mapping[str, str], work: Path) -> dict[str, str]:
    """The environment of a driver: nothing of the caller's that concerns vLLM, LMCache, Python or patches."""
    ours = ("LIVEPATCH", "PYTHON", "VLLM_", "LMCACHE_")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
        "LIVEPATCH_STATE_DIR": str(work / "state"),
        "LIVEPATCH_STATE_KEEP": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",  # a run that is told by its seed goes the same way again
        "VLLM_CACHE_ROOT": str(work / "cache"),
        "VLLM_CONFIG_ROOT": str(work / "config"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_TARGET_DEVICE": "cpu",
        **variables,
    }
