"""Faults: how they are said, and what the supervisor makes of a part that is killed or stopped on purpose."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import supervisor
from vllm_livepatch.tools.lab.faults import Fault, parse, play
from vllm_livepatch.tools.lab.supervisor import PartFailed, Supervisor

from tests.unit.test_lab_supervisor import STUBBORN_CHILD, child_of, gone, record, server

PARTS = ("prefill", "decode")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kill-decode", Fault("kill", "decode", 5.0, None)),
        ("kill-decode@2.5", Fault("kill", "decode", 2.5, None)),
        ("kill-prefill@1+20", Fault("kill", "prefill", 1.0, 20.0)),
        ("stop-decode", Fault("stop", "decode", 5.0, 10.0)),
        ("stop-decode@0+3", Fault("stop", "decode", 0.0, 3.0)),
    ],
)
def test_a_fault_says_what_when_and_for_how_long(text: str, expected: Fault) -> None:
    assert parse([text], PARTS) == (False, [expected])
    assert parse([text, "disconnects"], PARTS) == (True, [expected])


@pytest.mark.parametrize(
    "text", ["", "kill", "kill-", "kill-router", "stop-decode@", "kill-decode@x", "kill-decode+-1"]
)
def test_another_fault_is_an_error_that_names_those_there_are(text: str) -> None:
    with pytest.raises(
        UserError,
        match="disconnects, late-reads, late-requests, link, lost-completions, lost-prefills, "
        "slow-lmcache, slow-offload, slow-store, slow-transfer, kill-prefill, stop-prefill, kill-decode, stop-decode",
    ):
        parse([text], PARTS)


def test_what_is_killed_takes_its_children_along_and_can_come_back(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Supervisor(tmp_path) as parts:
            await parts.start([server("other"), server("victim", STUBBORN_CHILD)])
            before, child = record(tmp_path, "victim"), child_of(tmp_path / "victim.log")
            await parts.guard(play(Fault("kill", "victim", 0.0, 0.2), parts))
            assert gone(int(str(before["pid"])))
            assert gone(child)
            after = record(tmp_path, "victim")
            assert psutil.pid_exists(int(str(after["pid"])))
            assert (after["command"], after["pid"] != before["pid"]) == (before["command"], True)
            assert {entry["part"] for entry in parts.processes()} == {"other", "victim"}

    asyncio.run(scene())


def test_work_goes_on_without_a_part_that_was_killed_but_not_without_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mocker: MockerFixture
) -> None:
    monkeypatch.setattr(supervisor, "_LOOK_SECONDS", 0.02)
    turns = mocker.spy(asyncio, "wait")

    async def scene() -> None:
        async with Supervisor(tmp_path) as parts:
            await parts.start([server("other"), server("victim")])
            forever = asyncio.create_task(parts.guard(asyncio.Event().wait()))
            victim = int(str(record(tmp_path, "victim")["pid"]))
            parts.kill("victim")
            while psutil.pid_exists(victim):
                await asyncio.sleep(0.01)
            before = turns.call_count
            while turns.call_count < before + 3:  # in each it is looked at who has ended
                assert not forever.done()
                await asyncio.sleep(0.01)
            assert not forever.done()
            psutil.Process(int(str(record(tmp_path, "other")["pid"]))).kill()
            await forever

    with pytest.raises(PartFailed, match="other was ended by SIGKILL"):
        asyncio.run(scene())


def test_a_part_that_is_killed_while_it_is_stopped_comes_back_by_the_kills_end_alone(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Supervisor(tmp_path) as parts:
            await parts.start([server("victim")])
            faults = [Fault("stop", "victim", 0.0, 0.4), Fault("kill", "victim", 0.2, 0.6)]
            back = await asyncio.gather(*(play(fault, parts) for fault in faults))
            assert back == [False, True]
            assert parts.restarts == {"victim": 1}
            assert await play(Fault("stop", "victim", 0.0, 0.1), parts)

    asyncio.run(scene())


def test_the_silence_of_a_stopped_part_is_not_held_against_it_until_it_goes_on(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Supervisor(tmp_path) as parts:
            await parts.start([server("victim", silent_for=1.5)])
            pid = int(str(record(tmp_path, "victim")["pid"]))
            fault = asyncio.create_task(parts.guard(play(Fault("stop", "victim", 0.0, 3.0), parts)))
            while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.02)
            await fault
            assert psutil.Process(pid).status() != psutil.STATUS_STOPPED
            parts.pause("victim")

    asyncio.run(scene())
    assert gone(int(str(record(tmp_path, "victim")["pid"]))), "a stopped part is ended, too"
