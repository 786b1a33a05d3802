"""A container: namespaces of its own (PID, mount, user), a root that nobody may write to, the bundle at another path."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from vllm_livepatch.tools.in_bundle import status

from tests.unit import debian
from tests.unit.support import DEADLINE, PATCHED, PYTHON, USE_STEP, Done, Sandbox, finish, until

SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc")
OWN = (
    "--unshare-user",
    "--uid",
    "2000",
    "--gid",
    "2000",
    "--unshare-pid",
    "--as-pid-1",
    "--unshare-ipc",
    "--proc",
    "/proc",
)
"""Not the host's name: with the host's network a container shares it, and only the PID namespace tells them apart."""
SERVE = f"{USE_STEP}; import signal, sys; sys.stdout.flush(); signal.pause()"
ENDED = "end of what it said"


def words(sandbox: Sandbox, *more: str, own: tuple[str, ...] = OWN) -> list[str]:
    """bubblewrap, in front of what is to be run: an image of this system, the engine and the bundle, for reading only."""
    places = [place for place in SYSTEM if os.path.exists(place)]
    if not any(Path(sys.base_prefix).is_relative_to(place) for place in places):
        places.append(sys.base_prefix)
    mounts = [word for place in places for word in ("--ro-bind", place, place)]
    mounts += ["--ro-bind", str(sandbox.bundle), "/livepatch", "--ro-bind", str(sandbox.site), "/site", "--dev", "/dev"]
    return [str(debian.needed("bwrap")), *own, *mounts, *more, "--remount-ro", "/", "--die-with-parent", "--chdir", "/"]


def environ(**more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": "/home/nobody", "PYTHONPATH": "/livepatch:/site", **more}


@pytest.fixture(autouse=True)
def allowed(patched: Sandbox) -> None:
    """Namespaces for a user without privileges are not to be had everywhere: within a container, for one."""
    done = finish([*words(patched), "true"], environ())
    if done.code:
        debian.lack("namespaces for bwrap")


class Container:
    """A shell is its process 1, and runs what it is told to, as `docker exec` would."""

    def __init__(self, command: list[str], variables: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._shell = subprocess.Popen(
            [*command, "sh"], env=dict(variables), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )
        self._deadline = threading.Timer(DEADLINE, self._shell.kill)
        self._deadline.start()

    def run(self, *command: str) -> Done:
        """Run to its end; `err` is in `out`."""
        return self.script(" ".join(map(shlex.quote, command)))

    def script(self, line: str) -> Done:
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{line}\ncode=$?; echo; echo {ENDED} $code\n")
        self._shell.stdin.flush()
        lines: list[str] = []
        for found in self._shell.stdout:
            if found.startswith(ENDED):
                return Done(int(found.split()[-1]), "".join(lines)[:-1], "")
            lines.append(found)
        raise AssertionError(f"the container ended: {lines}")

    def end(self) -> None:
        """As `docker kill` does: nothing in it gets to say goodbye."""
        self._deadline.cancel()
        self._shell.kill()
        self._shell.communicate(timeout=30)


Start = Callable[[], Container]


@pytest.fixture
def start(patched: Sandbox) -> Iterator[Start]:
    """Containers, each with the same state directory of the host's."""
    patched.state.mkdir()
    begun: list[Container] = []

    def container() -> Container:
        shared = words(patched, "--bind", str(patched.state), "/state")
        begun.append(Container(shared, environ(LIVEPATCH="strict", LIVEPATCH_STATE_DIR="/state")))
        return begun[-1]

    yield container
    for one in begun:
        one.end()


def serving(container: Container) -> int:
    """Start an engine in it: its pid there."""
    done = container.script(f"{PYTHON} -c {shlex.quote(SERVE)} >/dev/null 2>&1 & echo $!")
    assert done.code == 0
    return int(done.out)


def pids(container: Container) -> list[int]:
    return [process["pid"] for process in json.loads(container.run(PYTHON, "/livepatch", "status", "--json").out)]


def test_nothing_there_can_be_written_to(patched: Sandbox) -> None:
    """No cache, no state directory, no temporary one: the engine is patched, and one line says what could not be left."""
    container = words(patched)
    done = finish([*container, "touch", "/livepatch/x", "/x", "/tmp/x"], environ())
    assert done.code == 1
    done = finish([*container, PYTHON, "/livepatch", "doctor", "--json"], environ(LIVEPATCH="strict"))
    assert done.code == 0, done.out
    results = {check["name"]: check["result"] for check in json.loads(done.out)["checks"]}
    assert {name for name, result in results.items() if result != "ok"} == {"cache", "state directory"}
    assert results["cache"] == results["state directory"] == "warning"
    done = finish([*container, PYTHON, "-c", USE_STEP], environ(LIVEPATCH="strict"))
    assert (done.code, done.out) == (0, PATCHED)
    assert "applied=around" in done.greeting
    assert "no report" in done.greeting
    assert done.others == []
    done = finish([*container, PYTHON, "/livepatch", "verify"], environ())
    assert (done.code, done.err) == (0, "")


def test_status_from_within(patched: Sandbox, start: Start) -> None:
    container = start()
    ask = (PYTHON, "/livepatch", "status", "--require", "around")
    assert container.run(*ask).code == 1  # nobody is there
    assert container.run(PYTHON, "-c", USE_STEP).out.endswith(PATCHED)
    assert list(patched.state.iterdir()) == []  # it has taken its report along
    pid = serving(container)
    until(lambda: pids(container) == [pid])
    done = container.run(*ask)
    assert (done.code, done.out) == (0, "yes: 1 of 1 live processes have around\n")
    assert f"pid {pid} on " in container.run(*ask[:3]).out
    assert container.script(f"kill -9 {pid}; wait {pid}").code == 137
    assert container.run(*ask).code == 1
    done = container.run(*ask[:3], "--prune")
    assert f"removed the reports of 1 ended processes: {pid}\n" in done.out
    assert list(patched.state.iterdir()) == []


def test_status_from_without_and_from_another_container(patched: Sandbox, start: Start) -> None:
    """On one host name, where each has its own processes 1 and 2: who cannot look there knows by the report's lock."""
    one, other = start(), start()
    pid = serving(one)
    until(lambda: pids(one) == [pid])
    (report,) = patched.state.iterdir()
    assert json.loads(report.read_text("ascii"))["host"] == os.uname().nodename
    ask = (PYTHON, "/livepatch", "status", "--prune", "--require", "around")
    found = status.read(patched.state)
    assert [(process["pid"], seen) for process, seen in zip(found.live, found.seen, strict=True)] == [(pid, True)]
    assert (found.ended, status.unmet(found, [status.Required("around")])) == ([], [])
    assert status.prune(found) == []
    done = other.run(*ask)
    assert done.code == 0, done.out
    assert done.out.startswith("yes: 1 of 1 live processes have around\n")
    assert report.exists()
    one.script(f"kill -9 {pid}; wait {pid}")
    one.end()
    found = status.read(patched.state)
    assert (found.live, found.ended) == ([], [(pid, report)])
    assert pids(other) == []
    done = other.run(*ask)
    assert (done.code, report.exists()) == (1, False)
    assert f"removed the reports of 1 ended processes: {pid}\n" in done.out


def test_strict_where_nothing_is_mounted(patched: Sandbox) -> None:
    """A mount that an upgrade has emptied: doctor is not there to be run, and an image's probe fails with it."""
    shutil.rmtree(patched.bundle)
    patched.bundle.mkdir()
    done = finish([*words(patched), PYTHON, "/livepatch", "doctor"], environ())
    assert done.code != 0


FREE = 'while :; do sh -c \'test -e /proc/$$ && exit 200; exec "$@"\' sh "$@"; code=$?; [ $code = 200 ] || exit $code; done'
"""Run a command as a process whose number nobody has in /proc."""


@pytest.mark.parametrize("proc", [("--ro-bind", "/proc", "/proc"), ()], ids=["the host's", "none"])
def test_a_proc_that_is_not_its_own(patched: Sandbox, proc: tuple[str, ...]) -> None:
    """There /proc/PID is another process, or nothing: a live process must not be taken for an ended one."""
    patched.state.mkdir()
    own = (*OWN[: OWN.index("--proc")], *proc)
    code = f"{USE_STEP}; import subprocess, sys; sys.stdout.flush()\n"
    code += "sys.exit(subprocess.call([sys.executable, '/livepatch', 'status', '--prune', '--require', 'around']))"
    command = words(patched, "--bind", str(patched.state), "/state", own=own)
    done = finish([*command, "sh", "-c", FREE, "sh", PYTHON, "-c", code], environ(LIVEPATCH_STATE_DIR="/state"))
    assert done.code == 0, done.out + done.err
    assert "removed the reports of 0 ended processes" in done.err
