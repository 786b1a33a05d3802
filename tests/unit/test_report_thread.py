"""The thread that writes the report: how long it sleeps, and what a fork and the exit wait for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import cache, report_thread
from vllm_livepatch.sitecustomize.report_thread import ReportThread

from tests.unit import interpreters
from tests.unit.support import PATCHED, USE_STEP, Sandbox, until


class Thread:
    """A report thread on a clock that stands still; `waits` has for how long it goes to sleep, `done` what it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.waits: list[float] = []
        self.by: list[str] = []
        self.due = float("inf")
        self.content: Any = "content"
        self.hang: threading.Event | None = None
        world = self

        class Condition(threading.Condition):
            def wait(self, timeout: float | None = None) -> bool:
                if threading.current_thread() is world.reporter._thread and timeout is not None:
                    world.waits.append(timeout)
                return super().wait(timeout)

        self.real = time.monotonic
        monkeypatch.setattr(threading, "Condition", Condition)
        self.reporter: ReportThread[Any] = ReportThread(lambda: self.content, self.write, self.end, lambda: self.due)

    def write(self, content: Any) -> None:
        self.note(f"write {content}")

    def end(self, content: Any) -> None:
        self.note(f"end {content}")

    def note(self, what: str) -> None:
        self.by.append(threading.current_thread().name)
        self.done.append(what)
        if self.hang:
            self.hang.wait()


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[Thread]:
    made = Thread(monkeypatch)
    yield made
    if made.hang:
        made.hang.set()
    made.reporter.close()


def test_what_is_asked_for_later_is_slept_for(thread: Thread) -> None:
    thread.reporter.soon(50.0)
    until(lambda: thread.waits)
    assert 40 < thread.waits[0] <= 50
    assert thread.done == []
    thread.reporter.soon(55.0)  # it is asked for already
    thread.reporter.soon(30.0)
    until(lambda: len(thread.waits) > 1)
    assert 20 < thread.waits[1] <= 30
    assert thread.reporter.flush(20.0)
    assert thread.done == ["write content"]
    until(lambda: len(thread.waits) > 2)
    assert thread.waits[2] > 50  # until the heartbeat


@pytest.mark.parametrize("ends", [True, False])
def test_who_asks_for_it_now_waits_for_the_seconds_that_it_says(
    ends: bool, thread: Thread, mocker: MockerFixture
) -> None:
    """A process waits so when its patches begin: a file system that hangs takes no more of it."""
    wait_for = mocker.patch.object(thread.reporter._changed, "wait_for", autospec=True, return_value=ends)
    assert thread.reporter.flush(7.0) is ends
    ((_, seconds), _) = wait_for.call_args
    assert seconds == 7.0


def test_it_is_written_by_itself_once_a_minute(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_thread, "HEARTBEAT_SECONDS", 0.01)
    thread.reporter.soon(0.0)
    until(lambda: len(thread.done) > 3)


def test_it_looks_when_something_is_due(thread: Thread) -> None:
    thread.due = 7.0
    thread.reporter.soon(0.0)
    until(lambda: thread.waits)
    assert 0 < thread.waits[0] <= 7
    assert thread.done == ["write content"]


def test_where_there_is_nothing_to_write_nothing_is_written(thread: Thread) -> None:
    thread.content = None
    assert thread.reporter.flush(20.0)
    thread.reporter.close()
    assert thread.done == ["end None"]


def test_the_exit_waits_for_the_last_report_once(thread: Thread) -> None:
    assert thread.reporter.flush(20.0)
    thread.reporter.close()
    thread.reporter.close()
    thread.reporter.soon(0.0)
    assert not thread.reporter.flush(0.1)
    assert thread.done == ["write content", "end content"]


def test_at_the_exit_of_a_process_in_which_nothing_happened_nothing_is_done(thread: Thread) -> None:
    thread.reporter.close()
    assert thread.done == []
    assert thread.reporter._thread is None


def test_after_a_fork_the_exit_does_not_wait_for_a_file_system_that_hangs(
    thread: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork ended the thread; the last report is a thread's again, and no more than two seconds are lost."""
    monkeypatch.setattr(report_thread, "EXIT_SECONDS", 0.01)
    assert thread.reporter.flush(20.0)
    thread.reporter.about_to_fork()
    thread.hang = threading.Event()
    thread.reporter.close()
    until(lambda: thread.done == ["write content", "end content"])
    assert thread.by == ["vllm-livepatch report"] * 2


def test_a_write_that_hangs_is_waited_for_once(thread: Thread) -> None:
    thread.hang = threading.Event()
    assert not thread.reporter.flush(0.01)
    assert thread.reporter.is_there()
    until(lambda: thread.done)
    stuck = thread.reporter._thread
    thread.reporter.about_to_fork()  # neither waits: the thread is still there
    thread.reporter.close()
    assert thread.reporter._thread is stuck
    assert thread.done == ["write content"]


def test_only_the_first_fork_waits_for_a_write_that_hangs(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_thread, "FORK_SECONDS", 0.01)
    thread.hang = threading.Event()
    thread.reporter.soon(0.0)
    until(lambda: thread.done)
    stuck = thread.reporter._thread
    thread.reporter.about_to_fork()
    joins: list[Any] = []
    monkeypatch.setattr(stuck, "join", joins.append)
    thread.reporter.about_to_fork()
    assert not thread.reporter.flush(20.0)
    thread.reporter.close()
    assert joins == []


def test_a_fork_ends_the_thread_once_it_has_done_what_it_was_asked_to(thread: Thread) -> None:
    thread.reporter.soon(50.0)
    until(lambda: thread.waits)
    running = thread.reporter._thread
    assert running is not None
    thread.reporter.about_to_fork()
    assert not running.is_alive()
    assert thread.done == ["write content"]
    thread.reporter.soon(0.0)  # what is asked next starts it again
    until(lambda: len(thread.done) == 2)


def test_a_fork_waits_until_the_system_has_let_go_of_the_thread(
    thread: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 and later count the system's threads, and warn of a fork that has more than one."""
    assert thread.reporter.flush(20.0)
    still = [True, True, False]
    yields: list[int] = []
    monkeypatch.setattr(os.path, "exists", lambda path: still.pop(0))
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1))
    thread.reporter.about_to_fork()
    monkeypatch.undo()
    assert (still, len(yields)) == ([], 2)


def test_each_who_asks_waits_for_a_write_of_its_own(thread: Thread) -> None:
    """One that was under way before may not have what is asked for."""
    assert [thread.reporter.flush(20.0) for _ in range(3)] == [True] * 3
    assert thread.done == ["write content"] * 3


def test_in_a_child_of_multiprocessing_the_last_report_comes_after_what_others_do(
    thread: Thread, mocker: MockerFixture
) -> None:
    """The child ends by `os._exit`; finalizers, down to its queues' at -5, may still call what is patched."""
    finalize = mocker.patch("multiprocessing.util.Finalize")
    assert thread.reporter.flush(20.0)
    assert thread.reporter.flush(20.0)
    (call,) = finalize.call_args_list  # registered once
    assert call.kwargs["exitpriority"] < -5
    obj, callback = call.args
    assert obj is None  # it lives as long as the process
    callback()
    assert thread.done == ["write content", "write content", "end content"]


def test_a_forked_child_begins_anew(thread: Thread) -> None:
    assert thread.reporter.flush(20.0)
    thread.reporter.about_to_fork()
    thread.reporter.forked_child()
    until(lambda: thread.waits and thread.waits[-1] <= report_thread.CHILD_SECONDS)
    assert thread.waits[-1] > report_thread.CHILD_SECONDS / 2
    thread.reporter.close()  # nothing happened in it
    assert thread.done == ["write content"]


def test_where_no_thread_can_be_had_the_exit_writes_itself(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    thread.reporter.soon(0.0)
    assert not thread.reporter.flush(20.0)
    assert not thread.reporter.is_there()
    thread.reporter.close()
    assert (thread.done, thread.by) == (["end content"], ["MainThread"])


def test_what_is_due_within_a_second_is_not_slept_over(thread: Thread) -> None:
    thread.due = 0.25
    thread.reporter.soon(0.0)
    until(lambda: thread.waits)
    assert 0 < thread.waits[0] <= 0.25


@pytest.mark.parametrize("step", ["look", "write", "due"])
def test_an_error_ends_no_reporting(thread: Thread, step: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It looks at objects of others, whose code may raise anything; what comes next is written, and the last one."""
    failing = [SystemExit(1), ValueError("of theirs")]

    def fail_first(given: Any = "content") -> Any:
        if failing:
            raise failing.pop(0)
        return given

    real = thread.note
    if step == "look":
        thread.reporter._look = fail_first
    elif step == "write":
        thread.reporter._write = lambda content: (fail_first(), real(f"write {content}"))[1]
    else:
        thread.reporter._due_in = lambda: fail_first(float("inf"))
    until(lambda: thread.reporter.flush(20.0) and thread.done)
    assert thread.done[-1] == "write content"
    assert failing == []
    (line,) = capfd.readouterr().err.splitlines()  # once
    assert line == "vllm-livepatch: a report failed, please report it: SystemExit: 1"
    thread.reporter.close()
    assert thread.done[-1] == "end content"


def test_a_look_that_raises_is_not_taken_again_and_again(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is due stays due, and the thread would look without a pause."""
    looks: list[int] = []

    def look() -> Any:
        looks.append(1)
        raise ValueError

    thread.reporter._look = look
    thread.due = -1.0
    thread.reporter.flush(20.0)
    until(lambda: thread.waits)
    assert len(looks) <= 2  # the first may have been due by itself
    assert thread.waits[-1] > 50


def test_the_exit_without_a_thread_survives_an_error(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("none left")))

    def look() -> Any:
        raise ValueError

    thread.reporter._look = look
    thread.reporter.soon(0.0)
    thread.reporter.close()
    assert thread.done == ["end None"]


def test_its_thread_takes_no_signal(thread: Thread) -> None:
    """A program blocks a signal in its own threads and waits for it: another thread that takes it ends the process.

    Those of a fault stay open, for faulthandler.
    """
    masks: list[set[Any]] = []

    def look() -> Any:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return "content"

    thread.reporter._look = look
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert thread.reporter.flush(20.0)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    can_be = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    assert can_be - masks[0] == {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


def test_nor_does_one_that_waits_for_a_file_system() -> None:
    masks = cache.in_time(signal.pthread_sigmask, signal.SIG_BLOCK, [])
    assert masks is not None
    assert {signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1} <= masks


WAITS_FOR_IT = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.kill(os.getpid(), signal.SIGTERM)
print(signal.sigwait({signal.SIGTERM}) == signal.SIGTERM)
"""


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_a_program_that_waits_for_a_signal_gets_it(patched: Sandbox, version: str) -> None:
    done = patched.python(f"{USE_STEP}\n{WAITS_FOR_IT}", "-u", python=str(interpreters.find(version)))
    assert (done.code, done.out) == (0, f"{PATCHED}True\n"), done.err
