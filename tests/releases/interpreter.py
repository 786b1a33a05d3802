"""Interpreters for the drivers: forks of one that has imported what all releases import (see driver/warm.py)."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import executed
from vllm_livepatch.tools.lab import environments
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


SERVED = "LIVEPATCH_TEST_WARM"
"""The socket of a server that outlives a test run (`python interpreter.py SOCKET`), and forks for each that connects."""


def engine_python() -> Path:
    """The interpreter that has torch and all else that vLLM imports: LIVEPATCH_TEST_PYTHON, else one built for it."""
    given = os.environ.get("LIVEPATCH_TEST_PYTHON")
    return Path(given) if given else environments.engine()


def made_bundle(directory: Path) -> Path:
    """A bundle in this directory, which is not there yet, made by the command that users make theirs with."""
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", "generate", "--out", str(directory)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return directory


class Interpreter:
    """Runs drivers, one at a time, each in a process of its own. Close it when done."""

    def __init__(self, python: Path, directory: Path) -> None:
        self._server: subprocess.Popen[str] | None = None
        served = os.environ.get(SERVED)
        if served:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(served)
                self._jobs: IO[str] = open(os.dup(connection.fileno()), "w", buffering=1)  # noqa: SIM115
                self._answers: IO[str] = open(os.dup(connection.fileno()))  # noqa: SIM115
            assert self._answer(SECONDS) == "ready"
            return
        self._log = directory / "warm.log"
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                _server(python),
                env=_environ({}, directory),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._jobs, self._answers = self._server.stdin, self._server.stdout
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
        words = [str(DRIVERS / f"{driver}.py"), *arguments]
        result = self.start(words, [*([bundle] if bundle else []), *given.values(), *path], work, environ or {})
        for package, place in given.items():
            assert Path(result[package]).is_relative_to(place), f"another {package} than the release's was driven"
        # A package that was not put on the path is the engine environment's: of the newest pinned release.
        own = {name: registry.pins(name)[-1].version for name in ("lmcache",) if result.get(name) and name not in given}
        executed.note(driver, {**releases, **own}, work / "state" if bundle else None, with_stock)
        return result

    def start(
        self, words: Sequence[str], searched: Sequence[Path], work: Path, environ: Mapping[str, str]
    ) -> dict[str, Any]:
        """Run a program and its arguments in `work`, and return the JSON that it prints; fails where there is none."""
        job = {
            "argv": words,
            "environ": _environ({**environ, "PYTHONPATH": _joined(searched)}, work),
            "cwd": str(work),
            "path": [str(entry) for entry in searched],
            "stdout": str(work / "stdout"),
            "stderr": str(work / "stderr"),
        }
        self._jobs.write(json.dumps(job) + "\n")
        child = int(self._answer(SECONDS) or "0")
        status = self._answer(SECONDS)
        if status is None:
            os.killpg(child, signal.SIGKILL)
            self._answer(SECONDS)
        stderr = (work / "stderr").read_text(encoding="utf-8", errors="replace")
        assert status == "0", f"{words} in {searched} ended with {status or 'a time-out'}:\n{stderr[-4000:]}"
        print(stderr)  # shown by pytest where a comparison fails
        result: dict[str, Any] = json.loads((work / "stdout").read_text(encoding="utf-8"))
        return result

    def close(self) -> None:
        """End the server, if it is this one's; what it forked has ended."""
        self._jobs.close()
        if self._server:
            self._server.wait(SECONDS)
        self._answers.close()

    def _answer(self, seconds: float) -> str | None:
        """The server's next line, None where there is none in time; each line is one write."""
        ready, _, _ = select.select([self._answers], [], [], seconds)
        return self._answers.readline().strip() if ready else None


def _server(python: Path) -> list[str]:
    """The command of a server."""
    lmcache = sources.site_packages("lmcache", registry.pins("lmcache")[-1].version)
    some = [sources.site_packages("vllm", pin.version) for pin in registry.pins("vllm")[::-3]]
    paths = json.dumps([[str(vllm), str(lmcache)] for vllm in some])
    return [str(python), str(DRIVERS / "warm.py"), paths, *WARMED_BY]


def serve(place: Path) -> NoReturn:
    """Become a server that listens at this socket, and does not end with who connects."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place))
        listening.listen(64)
        os.dup2(listening.fileno(), 0)
    command = _server(environments.engine())
    os.execve(command[0], command, _environ({}, place.parent))


def reported(work: Path, patch: str, pid: int | None = None) -> dict[str, Any]:
    """What the bundle reported of a patch in the one process that was run in `work`, or in the one of them with this id."""
    (file,) = (work / "state").glob("*.json" if pid is None else f"*-{pid}-*.json")
    return read(file, patch)


def read(file: Path, patch: str) -> dict[str, Any]:
    """What one process's report says of a patch."""
    (found,) = (entry for entry in json.loads(file.read_text(encoding="utf-8"))["patches"] if entry["name"] == patch)
    return dict(found)


_ON = ("MOONCAKE_FAILED_LOADS", "NIXL_PUSH_FAILURES")
OFF_BY_DEFAULT = dict.fromkeys((f"LIVEPATCH_{name}" for name in _ON), "on")
"""Patches that a later version may put on again: what they mend is shown as if they were on."""


def _joined(path: Sequence[Path]) -> str:
    return os.pathsep.join(map(str, path))


def _environ(variables: Mapping[str, str], work: Path) -> dict[str, str]:
    """The environment of a driver: nothing of the caller's that concerns vLLM, LMCache, Python or patches."""
    ours = ("LIVEPATCH", "PYTHON", "VLLM_", "LMCACHE_")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
        "LIVEPATCH_STATE_DIR": str(work / "state"),
        "LIVEPATCH_STATE_KEEP": "1",
        **OFF_BY_DEFAULT,
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


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
