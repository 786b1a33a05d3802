"""The reports: one a process, whatever way it was started; told apart when it is gone; never in the process's way."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import report, report_thread
from vllm_livepatch.tools.bundles import bundle as tools_bundle
from vllm_livepatch.tools.in_bundle import status

from tests.unit import interpreters
from tests.unit.support import PATCHED, PYTHON, STEP, USE_STEP, WORK, Sandbox, until

# A parent and children of every kind, each of which uses the engine, says so, and waits until stdin is closed.
FAMILY = """
import multiprocessing, os, sys

def child(name, ready, go):
    from fakeengine.scheduler import Scheduler
    ready.put((name, os.getpid(), Scheduler().step(7)))
    go.wait(50)

if __name__ == "__main__":
    from fakeengine.scheduler import Scheduler
    found = [("parent", os.getpid(), Scheduler().step(7))]
    started = []
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        ready, go = context.Queue(), context.Event()
        process = context.Process(target=child, args=(method, ready, go))
        process.start()
        found.append(ready.get(timeout=50))
        started.append((process, go))
    print(found, flush=True)
    sys.stdin.read()
    for process, go in started:
        go.set()
        process.join(50)
"""


def live(sandbox: Sandbox) -> list[dict[str, Any]]:
    return status.processes(sandbox.state)


def waiting(sandbox: Sandbox, code: str, **more: str) -> subprocess.Popen[str]:
    """A process that has run this code, and waits for its stdin to be closed."""
    command = [PYTHON, "-c", f"import sys\n{code}\nprint('ready', flush=True)\nsys.stdin.read()"]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, env=sandbox.environ(**more), text=True, **pipes)
    assert process.stdout is not None
    for line in process.stdout:
        if line == "ready\n":
            return process
    raise AssertionError(process.communicate()[1])


def test_spawn_fork_and_forkserver_children_each_leave_a_report(patched: Sandbox) -> None:
    script = patched.root / "family.py"
    script.write_text(FAMILY, "utf-8")
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environ = patched.environ(LIVEPATCH_STATE_KEEP="0")
    process = subprocess.Popen([PYTHON, str(script)], env=environ, text=True, **pipes)
    assert process.stdout is not None
    found = {name: pid for name, pid, step in eval(process.stdout.readline()) if step == ["patched", 7]}
    assert list(found) == ["parent", "spawn", "fork", "forkserver"]
    until(lambda: set(found.values()) <= {one["pid"] for one in live(patched)})
    by_pid = {one["pid"]: one for one in live(patched)}
    for name, pid in found.items():
        (patch,) = by_pid[pid]["patches"]
        assert patch["state"] == "applied", name
    # What a forked child counted is its own, not what its parent had counted when it was born.
    until(lambda: {one["pid"]: one for one in live(patched)}[found["fork"]]["patches"][0]["counters"] == {"calls": 1})
    _, err = process.communicate("")
    assert process.returncode == 0
    # One line a process that imported a target: the forked child imported nothing, its parent had.
    assert [line.split("pid ")[1].split(",")[0] for line in err.splitlines()] == [
        str(found[name]) for name in ("parent", "spawn", "forkserver")
    ]
    # Each has removed its report at its end: also those that multiprocessing ends without the interpreter's own way.
    assert set(by_pid) == set(found.values())
    until(lambda: not live(patched))
    assert list(patched.state.iterdir()) == []


ENDS = {
    "the end": ("", 0),
    "an exit": ("sys.exit(3)", 3),
    "an error": ("1 / 0", 1),
    "a fork before": ("os.waitpid(os.fork() or os._exit(0), 0)", 0),
}


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
@pytest.mark.parametrize("how", ENDS)
def test_a_process_removes_its_report_at_its_end(patched: Sandbox, how: str, version: str) -> None:
    code, expected = ENDS[how]
    listed = "print(sum(name.endswith('.json') for name in os.listdir(os.environ['LIVEPATCH_STATE_DIR'])))"
    script = f"import os, sys\n{USE_STEP}\n{listed}\n{code}"
    for keep, left in (("0", 0), ("1", 1)):
        done = patched.python(script, python=str(interpreters.find(version)), LIVEPATCH_STATE_KEEP=keep)
        assert (done.code, done.out) == (expected, f"{PATCHED}1\n"), done.err
        assert len(list(patched.state.iterdir())) == left


def test_a_process_that_is_killed_leaves_it(patched: Sandbox) -> None:
    process = waiting(patched, USE_STEP, LIVEPATCH_STATE_KEEP="0")
    until(lambda: live(patched))
    process.kill()
    process.communicate()
    assert [pid for pid, _ in status.read(patched.state).ended] == [process.pid]


@pytest.mark.parametrize("how", ["os._exit(0)", "sys.exit()", "os.execv(sys.executable, [sys.executable, '-c', ''])"])
def test_a_fork_leaves_no_report_until_it_counts_something(patched: Sandbox, how: str) -> None:
    """What forks most, forks to become another program or to do a little."""
    script = f"import os, sys\n{USE_STEP}\nsys.stdout.flush()\npid = os.fork()\nif not pid:\n    WORK; {how}\nprint(os.waitpid(pid, 0)[1])"
    done = patched.python(script.replace("WORK", "pass"))
    assert (done.code, done.out, len(done.lines)) == (0, f"{PATCHED}0\n", 1), done.err
    assert len(patched.reports()) == 1
    done = patched.python(script.replace("WORK", "Scheduler().step(1)"))
    assert done.out == f"{PATCHED}0\n"
    assert len(patched.reports()) == (3 if how == "sys.exit()" else 2)  # the other two end before it is written


def test_a_fork_that_lives_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine core that was forked may count nothing for hours, and `status` shows it."""
    written: list[int] = []
    reporter = report_thread.ReportThread(lambda: 1, written.append, lambda content: written.append(2))
    monkeypatch.setattr(report_thread, "CHILD_SECONDS", 0.05)
    reporter.forked_child()
    until(lambda: written == [1])
    reporter.close()
    assert written == [1, 2]


def test_counters_arrive_without_the_process_ending(patched: Sandbox) -> None:
    process = waiting(patched, f"{USE_STEP}\nfor _ in range(99): Scheduler().step(1)")
    until(lambda: live(patched)[0]["patches"][0]["counters"] == {"calls": 100})
    process.communicate("")
    assert process.returncode == 0


def test_the_form_of_a_process_in_status(sandbox: Sandbox) -> None:
    sandbox.patch()
    sandbox.patch("other", [WORK])
    sandbox.generate()
    process = waiting(sandbox, "from fakeengine.scheduler import Scheduler")
    (one,) = until(lambda: [one for one in live(sandbox) if one["patches"][0]["state"] == "applied"])
    process.communicate("")
    keys = ["pid", "host", "argv", "python", "started", "bundle", "packages", "patches"]
    assert list(one) == [*keys, "version", "digest", "settings", "heartbeat", "pid_namespace"]
    assert (one["version"], one["digest"], one["pid_namespace"]) == (
        tools_bundle.version(),
        tools_bundle.digest(tools_bundle.contents(sandbox.entries())),
        report.pid_namespace(),
    )
    assert one["settings"] == {"mode": "auto", "toggles": {}, "options": {}}
    assert abs(one["heartbeat"] - time.time()) < 3600
    assert (one["pid"], one["host"], one["python"]) == (process.pid, os.uname().nodename, PYTHON)
    assert one["argv"][:2] == [PYTHON, "-c"]
    assert one["bundle"] == str(sandbox.bundle)
    assert one["packages"] == {"fakeengine": "1.0"}
    assert one["started"].endswith("+00:00")
    form = {"name", "version", "state", "reason", "detail", "verdict", "targets", "counters"}
    around, other = one["patches"]
    assert set(around) == set(other) == form
    nothing: dict[str, object] = {"version": None, "reason": None, "detail": None, "counters": {}}
    assert around == {"name": "around", "state": "applied", "verdict": "needed", "targets": [STEP], **nothing}
    assert other == {"name": "other", "state": "armed", "verdict": None, "targets": [WORK], **nothing}


def test_a_process_that_was_killed_is_recognized_and_cleaned(patched: Sandbox) -> None:
    first, second = waiting(patched, USE_STEP), waiting(patched, USE_STEP)
    assert {one["pid"] for one in live(patched)} == {first.pid, second.pid}
    first.kill()  # a zombie until it is waited for: that is not a live process either
    until(lambda: report.start_ticks(first.pid) is None)
    assert (patched.state / f"{os.uname().nodename}-{first.pid}-none.json").exists() is False
    found = status.read(patched.state)
    assert ([one["pid"] for one in found.live], [pid for pid, _ in found.ended]) == ([second.pid], [first.pid])
    # Of the reports alone: one that is being written has a file beside it.
    assert len(list(patched.state.glob("*.json"))) == 2, "to look at something removes nothing"
    assert status.prune(found) == [first.pid]
    assert len(list(patched.state.glob("*.json"))) == 1
    assert status.read(patched.state).ended == []
    for process in (first, second):
        process.communicate("")


def test_a_recycled_pid_is_another_process(patched: Sandbox) -> None:
    process = waiting(patched, USE_STEP)
    # Its last write: one that came after ours would be the report of the live process again.
    until(lambda: live(patched)[0]["patches"][0]["counters"] == {"calls": 1})
    (file,) = patched.state.iterdir()
    content = json.loads(file.read_text("ascii"))
    content["start_ticks"] -= 1
    file.write_text(json.dumps(content), "ascii")
    found = status.read(patched.state)
    assert (found.live, found.ended) == ([], [(process.pid, file)])
    process.communicate("")


def test_another_hosts_process_counts_as_live(patched: Sandbox) -> None:
    patched.python(USE_STEP)
    (file,) = patched.state.iterdir()
    another = {"host": "elsewhere", "pid_namespace": "pid:[4026531836] another-boot"}
    content = json.loads(file.read_text("ascii")) | another
    file.write_text(json.dumps(content), "ascii")
    assert [one["host"] for one in live(patched)] == ["elsewhere"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"text"', '{"pid": 1}', "\xff"])
def test_what_is_no_report_is_passed_over_and_left_alone(patched: Sandbox, text: str) -> None:
    patched.state.mkdir()
    file = patched.state / "strange.json"
    file.write_text(text, "latin-1")
    (patched.state / "other.txt").write_text("somebody's")
    assert status.read(patched.state) == ([], [], [], [], [])
    assert file.exists()


def test_a_directory_that_does_not_exist_has_no_processes(tmp_path: Path) -> None:
    assert status.read(tmp_path / "none") == ([], [], [], [], [])


# A report that cannot be left is said once, in the one line, and changes nothing else.


def unreported(sandbox: Sandbox, state: str, **options: str) -> str:
    done = sandbox.python(USE_STEP, LIVEPATCH_STATE_DIR=state, **options)
    assert (done.code, done.out) == (0, PATCHED)
    (line,) = done.lines
    assert "; no report in " in line
    return line


def test_a_state_directory_that_is_a_file(patched: Sandbox) -> None:
    patched.state.write_text("")
    assert str(patched.state) in unreported(patched, str(patched.state))


def test_a_state_directory_below_a_file(patched: Sandbox) -> None:
    patched.state.write_text("")
    unreported(patched, f"{patched.state}/below/it")


def test_a_state_directory_on_a_system_that_has_no_room(patched: Sandbox) -> None:
    unreported(patched, "/proc/nothing/can/be/made/here")


def test_a_full_state_directory(patched: Sandbox) -> None:
    """No byte can be written to any file, as on a full disk; and no half of a report stays."""
    code = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n{USE_STEP}"
    patched.state.mkdir()
    done = patched.python(code)
    assert (done.code, done.out) == (0, PATCHED)
    (line,) = done.lines
    assert f"; no report in {patched.state}" in line
    assert list(patched.state.iterdir()) == []


def test_a_state_directory_is_made(patched: Sandbox) -> None:
    patched.python(USE_STEP, LIVEPATCH_STATE_DIR=str(patched.state / "a" / "b"))
    (file,) = (patched.state / "a" / "b").iterdir()
    assert file.suffix == ".json"


@pytest.mark.parametrize("given", [{}, {"LIVEPATCH_STATE_DIR": ""}], ids=["unset", "empty"])
@pytest.mark.parametrize("kind", ["absent", "own", "a link", "a file"])
def test_the_default_directory_is_ours_or_is_not_used(patched: Sandbox, kind: str, given: dict[str, str]) -> None:
    """Its name is under a directory that everybody can write to, so somebody else may have been there first."""
    temporary = patched.root / "tmp"
    default = temporary / f"vllm-livepatch-{os.getuid()}"
    temporary.mkdir()
    if kind == "own":
        default.mkdir()
    elif kind == "a link":
        (patched.root / "elsewhere").mkdir()
        default.symlink_to(patched.root / "elsewhere")
    elif kind == "a file":
        default.write_text("")
    environ = patched.environ(TMPDIR=str(temporary))
    del environ["LIVEPATCH_STATE_DIR"]
    done = subprocess.run([PYTHON, "-c", USE_STEP], env={**environ, **given}, capture_output=True, text=True)
    assert done.stdout == PATCHED
    if kind in ("absent", "own"):
        (file,) = default.iterdir()
        assert json.loads(file.read_text("ascii"))["patches"][0]["state"] == "applied"
        assert default.stat().st_mode & 0o777 == 0o700 or kind == "own"
        assert report.directory({}) != ""
    else:
        assert "; no report in " in done.stderr
        assert not (patched.root / "elsewhere").exists() or list((patched.root / "elsewhere").iterdir()) == []


def test_start_ticks_name_a_process() -> None:
    assert report.start_ticks(os.getpid()) == report.start_ticks(os.getpid())
    assert isinstance(report.start_ticks(os.getpid()), int)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert report.start_ticks(ended.pid) is None


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_a_fork_right_after_the_import_is_as_quiet_as_without(patched: Sandbox, version: str) -> None:
    """A thread of ours would make it a fork of a process with threads, of which newer interpreters warn."""
    code = f"import os, sys\n{USE_STEP}\nsys.stdout.flush()\npid = os.fork()\nif not pid: os._exit(Scheduler().step(4)[-1])\n"
    done = patched.python(
        f"{code}print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
        "-W",
        "always",
        python=str(interpreters.find(version)),
    )
    assert (done.code, done.out) == (0, f"{PATCHED}4\n"), done.err
    assert len(done.lines) == 1


def test_a_long_command_line_is_looked_at_once(tmp_path: Path, mocker: MockerFixture) -> None:
    """A thousand adapters take a tenth of a second, and a report comes each second while counters change."""
    looks = mocker.patch.object(report, "without_secrets", return_value=["shown"])
    mine = report.ProcessReport({"LIVEPATCH_STATE_DIR": str(tmp_path)}, {})
    for _ in range(3):
        mine.write({}, [])
        mine.begin()  # as in a forked child
    assert looks.call_count == 1
    (file, *_) = tmp_path.glob("*.json")
    assert json.loads(file.read_text(encoding="utf-8"))["argv"] == ["shown"]


def test_a_report_that_cannot_be_written_to_its_end_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = report.ProcessReport({"LIVEPATCH_STATE_DIR": str(tmp_path)}, {"note": "first"})
    mine.write({}, [])
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    write = os.write

    def half(file: int, data: bytes) -> int:
        if len(data) < 40:
            raise OSError(28, "No space left on device")
        return write(file, data[: len(data) // 2])

    def unusual(*given: Any, **named: Any) -> None:
        raise OSError("of an unusual kind")

    monkeypatch.setattr(os, "write", half)
    mine.write({"vllm": "1.0"}, [])
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == before
    assert json.loads(before)["note"] == "first"
    assert mine.error == f"no report in {tmp_path}: No space left on device"
    monkeypatch.setattr(os, "replace", unusual)
    mine.write({}, [])
    assert mine.error == f"no report in {tmp_path}: of an unusual kind"
    monkeypatch.undo()
    mine.write({}, [])
    assert mine.error is None


def test_a_directory_that_is_made_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the process's umask."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        for environ in ({}, {"LIVEPATCH_STATE_DIR": str(tmp_path / "named")}):
            report.ProcessReport(environ, {}).write({}, [])
            place = Path(report.directory(environ))
            assert place.stat().st_mode & 0o777 == 0o700
            assert [file.stat().st_mode & 0o777 for file in place.iterdir()] == [0o600]
    finally:
        os.umask(before)


def test_what_is_no_directory_is_refused_as_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is named may be a link; one that nobody named may not."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        report.opened({"LIVEPATCH_STATE_DIR": str(tmp_path / "file")})
    (tmp_path / "place").mkdir()
    default = Path(report.directory({}))
    default.symlink_to(tmp_path / "place")
    os.close(report.opened({"LIVEPATCH_STATE_DIR": str(default)}))
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        report.opened({})


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_an_unnamed_directory_that_others_may_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = Path(report.directory({}))
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(PermissionError, match="others may write to it"):
        report.opened({})
    os.close(report.opened({"LIVEPATCH_STATE_DIR": str(place)}))
    place.chmod(0o700)
    os.close(report.opened({}))


def test_start_ticks_are_when_it_started_and_a_zombie_has_none() -> None:
    """/proc/uptime has the seconds since boot; a tick is 1/SC_CLK_TCK of one. A zombie's file is there to be read."""

    def ticks() -> float:
        return float(Path("/proc/uptime").read_text("ascii").split()[0]) * os.sysconf("SC_CLK_TCK")

    before = ticks()
    process = subprocess.Popen([PYTHON, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    after = ticks()
    started = report.start_ticks(process.pid)
    assert started is not None
    assert before - 2 <= started <= after + 2
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
    assert Path(f"/proc/{process.pid}/stat").exists()
    assert report.start_ticks(process.pid) is None
    process.wait()


def test_where_proc_cannot_be_read_a_pid_is_of_no_namespace(mocker: MockerFixture) -> None:
    assert report.pid_namespace() is not None
    mocker.patch.object(os, "readlink", side_effect=OSError)
    assert report.pid_namespace() is None


def test_an_unnamed_directory_of_somebody_else_is_refused(tmp_path: Path, mocker: MockerFixture) -> None:
    mocker.patch.object(tempfile, "gettempdir", return_value=str(tmp_path))
    mocker.patch.object(os, "getuid", return_value=os.getuid() + 1)
    place = Path(report.directory({}))
    place.mkdir(mode=0o700)
    with pytest.raises(PermissionError, match="belongs to somebody else") as caught:
        report.opened({})
    assert (caught.value.errno, caught.value.filename) == (errno.EPERM, str(place))
    os.close(report.opened({"LIVEPATCH_STATE_DIR": str(place)}))


def test_a_directory_that_is_named_may_be_a_link_and_others_may_write_to_it(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    found = report.opened({"LIVEPATCH_STATE_DIR": str(tmp_path / "link")})
    assert os.path.samestat(os.fstat(found), os.stat(tmp_path / "shared"))
    os.close(found)


def test_a_system_without_a_temporary_directory(mocker: MockerFixture) -> None:
    """Reports go nowhere; those that were left where it would be can be read."""
    mocker.patch.object(tempfile, "gettempdir", side_effect=FileNotFoundError(errno.ENOENT, "No usable one"))
    name = f"vllm-livepatch-{os.getuid()}"
    for given, place in (({"TMPDIR": "/proc/none"}, f"/proc/none/{name}"), ({"TMPDIR": ""}, f"/tmp/{name}")):
        mocker.patch.dict(os.environ, given)
        assert report.directory({}) == place
    mocker.patch.dict(os.environ, {"TMPDIR": "/proc/none"})
    left = report.ProcessReport({}, {})
    left.write({}, [])
    assert left.error == f"no report in /proc/none/{name}: No such file or directory"
    left.error = None
    left.late()
    assert left.error == f"no report yet in /proc/none/{name}, which is slow to answer"


def test_what_lies_in_the_way_of_a_report_is_neither_followed_nor_changed(
    tmp_path: Path, mocker: MockerFixture
) -> None:
    left = report.ProcessReport({"LIVEPATCH_STATE_DIR": str(tmp_path)}, {})
    mocker.patch.object(os, "urandom", return_value=b"known")
    victim = tmp_path / "victim"
    (tmp_path / f".{b'known'.hex()}.tmp").symlink_to(victim)
    left.write({}, [])
    assert left.error is not None
    assert not victim.exists()


def test_a_process_that_has_left_no_report_does_not_look_for_it_at_its_end(
    tmp_path: Path, mocker: MockerFixture
) -> None:
    """The directory may be one that does not answer, and its exit would wait for that."""
    mine = report.ProcessReport({"LIVEPATCH_STATE_DIR": str(tmp_path)}, {})
    looked = mocker.spy(report, "opened")
    mine.remove()
    assert looked.call_count == 0
    mine.write({}, [])
    assert len(list(tmp_path.iterdir())) == 1
    mine.remove()
    assert list(tmp_path.iterdir()) == []
    mine.write({}, [])
    mine.begin()  # it is a forked child now: what is there is its parent's
    looked.reset_mock()
    mine.remove()
    assert looked.call_count == 0
    assert len(list(tmp_path.iterdir())) == 1
