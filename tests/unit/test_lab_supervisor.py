"""The supervisor and its launcher, with parts that are a few lines of Python."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from vllm_livepatch.tools.lab import supervisor as supervision
from vllm_livepatch.tools.lab.supervisor import Part, PartFailed, Supervisor
from vllm_livepatch.tools.lab.topology import free_ports

from tests.unit.support import until

# Answers 200 on the port that it is given, once it has done what {before} says.
SERVER = """
import http.server, sys
{before}
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
# A child that neither SIGTERM nor a closed terminal ends, in a session of its own, as far from the part as can be.
STUBBORN_CHILD = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import signal\\nsignal.signal(15, signal.SIG_IGN)\\nsignal.pause()"],
                         start_new_session=True)
print("child", child.pid, flush=True)
"""
ENVIRONMENT = {"PATH": os.environ["PATH"], "ONE": "1"}


def part(
    name: str, code: str, port: int, silent_for: float = 30.0, up_within: float = 60.0, grace: float = 0.5
) -> Part:
    command = (sys.executable, "-c", code, str(port))
    health = f"http://127.0.0.1:{port}/"
    return Part(name, command, ENVIRONMENT, health, up_within=up_within, silent_for=silent_for, grace=grace)


def server(name: str, before: str = "", **limits: float) -> Part:
    return part(name, SERVER.format(before=before), free_ports(1)[0], **limits)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def child_of(log: Path) -> int:
    found: list[str] = until(lambda: log.read_text().split("child", 1)[1:])
    return int(found[0].split()[0])


def record(directory: Path, name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((directory / f"{name}.json").read_text())
    return found


def bring_up(directory: Path, *parts: Part) -> None:
    async def up() -> None:
        async with Supervisor(directory) as supervisor:
            await supervisor.start(parts)

    asyncio.run(up())


def test_a_part_that_dies_at_once_ends_all_with_the_end_of_its_log(tmp_path: Path) -> None:
    dies = part("dies", "for n in range(100): print('line', n)\nraise SystemExit(3)", port=1)
    with pytest.raises(PartFailed) as caught:
        bring_up(tmp_path, server("lives", STUBBORN_CHILD), dies)
    assert (caught.value.part, caught.value.exit_code) == ("dies", 3)
    assert caught.value.tail == [f"line {number}" for number in range(60, 100)]
    assert str(caught.value).startswith("dies ended with exit code 3. The last lines of ")
    assert gone(int(str(record(tmp_path, "lives")["pid"])))
    assert gone(child_of(tmp_path / "lives.log"))


def test_a_part_that_a_signal_ends_is_named_with_the_signal(tmp_path: Path) -> None:
    with pytest.raises(PartFailed, match="killed was ended by SIGKILL \\(exit code 137\\)"):
        bring_up(tmp_path, part("killed", "import os; os.kill(os.getpid(), 9)", port=1))


def test_a_part_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    missing = Part("missing", ("/nowhere/at-all",), ENVIRONMENT, "http://127.0.0.1:1/")
    with pytest.raises(PartFailed, match="missing could not be started: /nowhere/at-all: No such file or directory"):
        bring_up(tmp_path, missing)


def test_a_part_that_never_stirs_is_silent(tmp_path: Path) -> None:
    mute = part("mute", "import signal; signal.pause()", free_ports(1)[0], silent_for=2)
    with pytest.raises(PartFailed, match="mute has been silent for 2 s"):
        bring_up(tmp_path, mute)


def test_a_part_that_talks_and_never_serves_meets_its_deadline(tmp_path: Path) -> None:
    chatter = "import threading\nwhile True: print('busy', flush=True); threading.Event().wait(0.1)"
    with pytest.raises(PartFailed, match="chatty did not get up within 4 s"):
        bring_up(tmp_path, part("chatty", chatter, free_ports(1)[0], silent_for=3, up_within=4))


def test_a_part_that_answers_that_it_is_not_well_ends_all_with_its_log_long_before_its_deadline(tmp_path: Path) -> None:
    code = SERVER.format(before="print('engine not initialized', flush=True)").replace("200", "503")
    unwell = replace(part("unwell", code, free_ports(1)[0]), unhealthy_for=1)
    with pytest.raises(
        PartFailed, match="unwell has answered HTTP 503 for 1 s where it is asked for its health"
    ) as caught:
        bring_up(tmp_path, unwell)
    assert "engine not initialized" in caught.value.tail


def test_a_part_may_say_that_it_is_not_well_for_a_while(tmp_path: Path) -> None:
    code = SERVER.format(before="import time; begun = time.monotonic()")
    code = code.replace("200", "200 if time.monotonic() > begun + 2 else 503")
    bring_up(tmp_path, replace(part("slow", code, free_ports(1)[0]), unhealthy_for=6))


def test_a_part_that_stops_answering_later_is_silent(tmp_path: Path) -> None:
    async def stop_one() -> None:
        async with Supervisor(tmp_path) as supervisor:
            await supervisor.start([server("frozen", silent_for=2)])
            os.kill(int(str(record(tmp_path, "frozen")["pid"])), signal.SIGSTOP)
            await supervisor.guard(asyncio.sleep(60))

    with pytest.raises(PartFailed, match="frozen has been silent for 2 s"):
        asyncio.run(stop_one())


def test_the_death_of_a_part_cancels_the_guarded_work(tmp_path: Path) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("work")

    async def kill_one() -> None:
        async with Supervisor(tmp_path) as supervisor:
            await supervisor.start([server("first"), server("second")])
            os.kill(int(str(record(tmp_path, "first")["pid"])), signal.SIGTERM)
            await supervisor.guard(work())

    with pytest.raises(PartFailed, match="first was ended by SIGTERM"):
        asyncio.run(kill_one())
    assert ended == ["work"]
    assert gone(int(str(record(tmp_path, "second")["pid"])))


def test_a_part_that_is_killed_again_before_it_serves_is_waited_for_by_nobody(tmp_path: Path) -> None:
    async def killed_twice() -> None:
        async with Supervisor(tmp_path) as supervisor:
            await supervisor.start([server("slow", "import os, signal\nos.path.exists('again') and signal.pause()")])
            supervisor.kill("slow")
            (tmp_path / "again").touch()
            back = asyncio.create_task(supervisor.restart("slow"))
            await asyncio.sleep(0)  # it has been launched
            assert not back.done()
            supervisor.kill("slow")
            await asyncio.wait_for(back, 30)

    asyncio.run(killed_twice())


def test_guarded_work_returns_its_result_and_its_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_LINGER_SECONDS", 0.2)

    async def work(fails: bool) -> int:
        if fails:
            raise ValueError("its own")
        return 7

    async def both() -> None:
        async with Supervisor(tmp_path) as supervisor:
            await supervisor.start([server("only")])
            assert await supervisor.guard(work(False)) == 7
            with pytest.raises(ValueError, match="its own"):
                await supervisor.guard(work(True))

    asyncio.run(both())


def test_work_that_fails_because_a_part_is_dying_is_the_part_s_failure(tmp_path: Path) -> None:
    async def work(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        raise ConnectionError("refused")

    async def kill_one() -> None:
        async with Supervisor(tmp_path) as supervisor:
            await supervisor.start([server("only")])
            await supervisor.guard(work(int(str(record(tmp_path, "only")["pid"]))))

    with pytest.raises(PartFailed, match="only was ended by SIGKILL"):
        asyncio.run(kill_one())


def test_a_part_waits_for_the_one_before_it_unless_it_may_start_beside(tmp_path: Path) -> None:
    eager_s = tmp_path / "eager.json"
    slow = f"import pathlib, time\nwhile not pathlib.Path({str(eager_s)!r}).is_file(): time.sleep(0.01)"
    slow += "\nprint('up', time.time(), flush=True)"
    needy, eager = server("needy"), server("eager")
    beside = Part(eager.name, eager.command, eager.environment, eager.health, beside=True)
    bring_up(tmp_path, server("slow", slow), beside, needy)
    up = float((tmp_path / "slow.log").read_text().split("up ", 1)[1].split()[0])
    started = {name: float(str(record(tmp_path, name)["started"])) for name in ("slow", "eager", "needy")}
    assert started["slow"] < started["eager"] < up < started["needy"]


def test_pid_command_and_environment_are_written_and_nothing_is_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "hush")

    async def look() -> None:
        async with Supervisor(tmp_path) as supervisor:
            await supervisor.start([server("only", STUBBORN_CHILD)])
            found = record(tmp_path, "only")
            pid = int(str(found["pid"]))
            assert psutil.Process(pid).cmdline() == found["command"]
            assert found["environment"] == ENVIRONMENT
            inside = psutil.Process(pid).environ()
            assert inside["ONE"] == "1"
            assert "A_SECRET" not in inside
            assert os.getsid(pid) not in (os.getsid(0), pid)
            seen = {entry["pid"] for entry in supervisor.processes()}
            assert seen == {pid, child_of(tmp_path / "only.log")}
            assert supervisor.up_seconds()["only"] >= 0

    asyncio.run(look())


DRIVER = f"""
import asyncio, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is born without
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.unit import test_lab_supervisor as tests
from vllm_livepatch.tools.lab import supervisor as supervision
from vllm_livepatch.tools.lab.supervisor import Supervisor
async def main():
    async with Supervisor(Path(sys.argv[1])) as supervisor:
        await supervisor.start([tests.server("first", tests.STUBBORN_CHILD), tests.server("second")])
        print("up", flush=True)
        await supervisor.guard(asyncio.sleep(600))
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_supervisor_leaves_no_process_and_no_port(tmp_path: Path, number: signal.Signals) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "up\n"
    pids = [int(str(record(tmp_path, name)["pid"])) for name in ("first", "second")]
    launchers = [psutil.Process(pid).ppid() for pid in pids]
    child = child_of(tmp_path / "first.log")
    command = record(tmp_path, "second")["command"]
    assert isinstance(command, list)
    driver.send_signal(number)
    assert driver.wait(20) != 0
    driver.stdout.close()
    for pid in (*pids, *launchers, child):
        until(partial(gone, pid))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(command[-1])))
