"""The lock on a report: who can take it knows that the process has ended, also from another container."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import report
from vllm_livepatch.tools.in_bundle import status

from tests.unit import debian, fleet
from tests.unit.support import PATCHED, PYTHON, USE_STEP, Cli, Sandbox, finish, until
from tests.unit.test_report import live, waiting

ELSEWHERE = ["unshare", *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "--pid", "--fork", "--mount-proc"]
"""Runs a command in a PID namespace of its own, as another container does, on the same file system."""


@pytest.fixture
def elsewhere() -> list[str]:
    done = subprocess.run([*ELSEWHERE, "true"], capture_output=True, text=True)
    return debian.lack(f"a PID namespace ({done.stderr.strip()})") if done.returncode else ELSEWHERE


def edit(file: Path, **content: Any) -> None:
    """In its place: the lock on it stays."""
    text = json.dumps(json.loads(file.read_text("ascii")) | content)
    with file.open("r+b") as opened:
        opened.write(text.encode("ascii"))
        opened.truncate()


def stopped(sandbox: Sandbox) -> tuple[subprocess.Popen[str], Path]:
    """A live process that writes no more, and its report."""
    process = waiting(sandbox, USE_STEP)
    until(lambda: live(sandbox) and live(sandbox)[0]["patches"][0]["counters"] == {"calls": 1})
    process.send_signal(signal.SIGSTOP)
    (file,) = sandbox.state.glob("*.json")
    return process, file


BOOT = str(report.pid_namespace()).split()[-1]
PLACES: dict[str, dict[str, Any]] = {
    "another container": {"host": "a1b2c3", "pid_namespace": f"pid:[1] {BOOT}"},
    "another machine": {"host": "node7", "pid_namespace": "pid:[4026531836] 5ce0-another-boot"},
    "nobody knows where": {"pid_namespace": None},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_process_that_cannot_be_looked_at_is_known_by_its_lock(patched: Sandbox, place: str) -> None:
    process, file = stopped(patched)
    try:
        edit(file, heartbeat=time.time() - 1e6, **PLACES[place])
        found = status.read(patched.state)
        assert ([one["pid"] for one in found.live], found.seen, found.ended) == ([process.pid], [True], [])
        assert status.unmet(found, [status.Required("around")]) == []
    finally:
        process.kill()
        process.communicate()
    found = status.read(patched.state)
    assert (found.live, found.ended) == ([], [(process.pid, file)])
    assert status.prune(found) == [process.pid]
    assert not file.exists()


@pytest.mark.parametrize("place", PLACES)
def test_a_lock_that_is_not_seen_from_another_kernel_is_not_missed(patched: Sandbox, place: str) -> None:
    """As of NFS with `nolock`: of a process that has written lately nobody says that it has ended."""
    process, file = stopped(patched)
    process.kill()
    process.communicate()
    edit(file, heartbeat=time.time(), **PLACES[place])
    found = status.read(patched.state)
    ended = place == "another container"
    assert ([pid for pid, _ in found.ended], found.seen) == ([process.pid] if ended else [], [] if ended else [False])


def test_ten_that_end_by_sigterm_and_who_looks_is_in_another_container(patched: Sandbox, elsewhere: list[str]) -> None:
    started = [waiting(patched, USE_STEP) for _ in range(10)]
    stays = waiting(patched, USE_STEP)
    until(lambda: len(live(patched)) == 11)
    for process in started:
        process.terminate()
        process.communicate()
    asked = [*elsewhere, PYTHON, str(patched.bundle), "status", "--state-dir", str(patched.state)]
    done = finish([*asked, "--json"], patched.environ())
    assert [one["pid"] for one in json.loads(done.out)] == [stays.pid], done.err
    assert len(list(patched.state.glob("*.json"))) == 11, "to look at something removes nothing"
    done = finish([*asked, "--prune", "--require", "around"], patched.environ())
    assert (done.code, done.err.startswith("removed the reports of 10 ended processes: ")) == (0, True)
    assert len(list(patched.state.glob("*.json"))) == 1
    stays.communicate("")
    assert finish([*asked, "--require", "around"], patched.environ()).code == 1


def test_a_forked_child_does_not_have_its_parents_lock(patched: Sandbox) -> None:
    """One that lives on after the parent has ended, and closes the descriptor that it was born with."""
    code = f"""{USE_STEP}
import os, signal
if not os.fork():
    signal.raise_signal(signal.SIGSTOP)  # before it has a report of its own
"""
    process = waiting(patched, code, LIVEPATCH_STATE_KEEP="0")
    (child,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    try:
        until(lambda: Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
        until(lambda: [one["patches"][0]["counters"] for one in live(patched)] == [{"calls": 1}])
        process.send_signal(signal.SIGSTOP)
        (file,) = patched.state.glob("*.json")
        open_there = [os.readlink(link) for link in Path(f"/proc/{child}/fd").iterdir()]
        assert str(file) not in open_there
        edit(file, **PLACES["another container"])
        assert status.read(patched.state).seen == [True]
        process.kill()
        process.wait()
        assert [pid for pid, _ in status.read(patched.state).ended] == [process.pid]
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate()


def test_a_program_that_closes_all_descriptors_loses_nothing_of_its_own(patched: Sandbox) -> None:
    """As a daemon does: the number is another file's when the next report is written."""
    code = f"""{USE_STEP}
import fcntl, glob, json, os
place = os.environ["LIVEPATCH_STATE_DIR"]
def calls():
    return [json.load(open(file))["patches"][0]["counters"].get("calls", 0) for file in glob.glob(place + "/*.json")]
def wait_for(number):
    while calls() != [number]:
        pass
wait_for(1)
def opened():
    found = {{}}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{{fd}}")
        except OSError:  # what the list itself was read by
            pass
    return found
while place in opened().values():  # the writer is about to close the directory
    pass
held = [fd for fd, name in opened().items() if name.startswith(place + "/")]
os.closerange(3, 1000)
mine = [os.open("/dev/zero", os.O_RDONLY) for _ in range(10)]
assert set(held) <= set(mine) and held, (held, mine)
Scheduler().step(1)
wait_for(2)
assert [os.read(fd, 1) for fd in mine] == [b"\\0"] * 10
"""
    done = patched.python(code)
    assert (done.code, done.out) == (0, PATCHED), done.err


def test_each_report_has_the_lock_before_its_name_and_one_descriptor_stays(tmp_path: Path) -> None:
    """Of two thousand writes, too."""
    program = f"""
import fcntl, os, struct, sys
from vllm_livepatch.sitecustomize import report
mine = report.ProcessReport({{"LIVEPATCH_STATE_DIR": {str(tmp_path)!r}}}, {{}})
mine.write({{}}, [])
before = len(os.listdir("/proc/self/fd"))
print("ready", flush=True)
while not os.path.exists({str(tmp_path / "enough")!r}):
    mine.write({{}}, [])
assert len(os.listdir("/proc/self/fd")) == before
mine.remove()
assert len(os.listdir("/proc/self/fd")) == before - 1
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        for _ in range(2000):
            (file,) = tmp_path.glob("*.json")
            text, held = status._read(file)
            assert (json.loads(text)["locked"], held) == (True, True)
    finally:
        (tmp_path / "enough").touch()
        assert process.wait() == 0


def test_a_report_that_is_written_twice_while_it_is_read(tmp_path: Path, mocker: MockerFixture) -> None:
    """The third has the inode of the first where that is free again: on ext4 it mostly is."""
    file, lstat, is_held = tmp_path / "report.json", os.lstat, report.is_held

    def write(text: str) -> None:
        (tmp_path / "new").write_text(text, "ascii")
        (tmp_path / "new").replace(file)

    def asked(opened: int) -> bool | None:
        if file.read_text("ascii") == "first":
            write("second")
        return is_held(opened)

    def looked(name: Path) -> os.stat_result:
        if file.read_text("ascii") == "second":
            write("third")
        return lstat(name)

    write("first")
    mocker.patch.object(report, "is_held", asked)
    mocker.patch.object(os, "lstat", looked)
    assert status._read(file) == ("third", False)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_locks(tmp_path: Path, mocker: MockerFixture, code: int) -> None:
    """The heartbeat decides, as before."""
    mocker.patch.object(fcntl, "fcntl", side_effect=OSError(code, "no locks"))
    mine = report.ProcessReport({"LIVEPATCH_STATE_DIR": str(tmp_path)}, {"bundle": ""})
    mine.write({"vllm": "1.0"}, [])
    mine.write({"vllm": "1.0"}, [])
    (file,) = tmp_path.iterdir()
    assert mine.error is None
    assert json.loads(file.read_text("ascii"))["locked"] is False
    edit(file, heartbeat=time.time() - 1e6, **PLACES["another container"])
    found = status.read(tmp_path)
    assert (len(found.live), found.seen, found.ended) == (1, [False], [])
    mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_three_thousand_dead_ones_of_other_machines(cli: Cli, tmp_path: Path) -> None:
    """Those of an earlier bundle, which took no lock, stay: of them nothing is known."""
    for number in range(3000):
        fleet.leave(tmp_path, fleet.patch("around"), host=f"node{number % 40}", silent=1000.0, locked=True)
    old = fleet.leave(tmp_path, fleet.patch("around"), silent=1e6)
    done = cli("status", "--state-dir", str(tmp_path), "--prune", "--summary")
    assert (done.code, done.out.splitlines()[0]) == (0, "1 process on 1 host, 1 of them not heard of for three minutes")
    assert list(tmp_path.iterdir()) == [old]


def test_another_program_of_the_same_pid(patched: Sandbox) -> None:
    """The process became another by `exec`, and its report speaks of the first."""
    code = f"{USE_STEP}\nimport os\nos.execv('/bin/sleep', ['sleep', '1000'])"
    process = subprocess.Popen([PYTHON, "-c", code], env=patched.environ(), stdout=subprocess.DEVNULL)
    try:
        (file,) = until(lambda: list(patched.state.glob("*.json")))
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
        assert [one["pid"] for one in live(patched)] == [process.pid]
        edit(file, heartbeat=time.time() - 1e6)
        assert [pid for pid, _ in status.read(patched.state).ended] == [process.pid]
    finally:
        process.kill()
        process.wait()
