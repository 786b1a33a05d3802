"""What the release tests of `moriio-timeouts` leave out: a request that ends twice, and several peers that are silent."""

from __future__ import annotations

import gc
import math
import queue
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.moriio_timeouts import reads
from vllm_livepatch.patches.moriio_timeouts import wrappers as patch
from vllm_livepatch.patches.moriio_timeouts.wrappers import Writes
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.tools.bundles import catalogue


class Transfer:
    pending = True


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    monkeypatch.setattr(reads, "in_progress", lambda status: status.pending)
    return Writes()


def test_a_request_ends_once(writes: Writes) -> None:
    """Whoever ends it first reports it; a second report would be of the next request with its id."""
    assert writes.end("one")
    assert not writes.end("one")
    assert writes.end("two")


def test_what_was_reported_may_end_again_under_its_id(writes: Writes) -> None:
    assert writes.end("one")
    writes.ended["one"] = 5.0  # reported: what was queued before is of no use
    assert writes.is_past(SimpleNamespace(request_id="one", enqueue_time=5.0))
    assert not writes.is_past(SimpleNamespace(request_id="one", enqueue_time=5.1))
    assert writes.end("one")
    assert writes.ended["one"] == math.inf


def test_a_request_that_was_given_up_is_released_when_its_last_transfer_has_ended(writes: Writes) -> None:
    first, second = Transfer(), Transfer()
    transfers: list[Any] = [first, second]
    writes.statuses["one"] = transfers
    writes.end("one")
    first.pending = False
    assert writes.take_released() == []
    second.pending = False
    assert writes.take_released() == ["one"]
    assert writes.take_released() == []


class Event:
    """Is set by a handshake, at a time that is known: whoever waits for it lets the worker's clock go on."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.is_set = False

    def set(self) -> None:
        self.is_set = True

    def wait(self, timeout: float = math.inf) -> bool:
        worker, end = self.worker, self.worker.now + timeout
        while not self.is_set and worker.handshakes and worker.handshakes[0][0] <= end:
            worker.now, entry, answered = worker.handshakes.pop(0)
            worker.hands_shaken(entry, answered)
        if not self.is_set:
            assert end < math.inf, "this wait would never end"
            worker.now = max(worker.now, end)
        return self.is_set


class Wrapper(SimpleNamespace):
    """MoRI-IO's wrapper of its engine, a stand-in. A plain SimpleNamespace cannot be referred to weakly."""


class Worker:
    """A prefill worker, which shakes hands with one peer after another, in `seconds` each: a stand-in for the release's."""

    is_producer = True
    mode = SimpleNamespace(name="WRITE")
    moriio_config = SimpleNamespace(backend="rdma")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.seconds = seconds
        self.begun: list[str] = []  # handshakes
        self.now = self.busy_until = 0.0
        monkeypatch.setattr(patch, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(patch, "threading", SimpleNamespace(Event=lambda: Event(self)))
        options = {"HANDSHAKE_SECONDS": 10.0, "TRANSFER_SECONDS": 1.0, "DEFER_SECONDS": 1.0}
        self.context = PatchContext("moriio-timeouts", options, {}, lambda: None)
        self.save_kv_layer = patch.wrappers(self.context)[f"{patch.WORKER}.save_kv_layer"]
        self.handshakes: list[
            tuple[float, Any, bool]
        ] = []  # when it ends, of which request, and whether it was answered
        self.write_ready_flags: dict[str, bool] = {}
        self._remote_agents: dict[str, str] = {}
        self._ready_requests: Any = None
        self._handshake_lock = threading.Lock()
        self.moriio_wrapper = Wrapper(
            lock=threading.Lock(), done_remote_allocate_req_dict={}, done_req_ids=[], transfer_status=[]
        )
        self.saved: list[str] = []

    def get_engine_name_with_dp(self, peer: str, rank: int) -> str:
        return peer

    def _background_moriio_handshake(self, request_id: str, peer: str, meta: Any) -> None:
        """One that is not answered ends when its socket gives up, after HANDSHAKE_SECONDS."""
        self.begun.append(request_id)
        seconds = self.seconds[meta.remote_host]
        self.busy_until = max(self.now, self.busy_until) + min(seconds, 10.0)
        self.handshakes.append((self.busy_until, (request_id, meta), seconds < 10.0))

    def hands_shaken(self, entry: tuple[str, Any], answered: bool) -> None:
        peer = f"{entry[1].remote_host}:1"
        self.write_ready_flags[peer] = True
        if answered:
            self._remote_agents[peer] = "an agent"
        self._ready_requests.put(entry)

    def layers(self, *requests: str) -> float:
        """A step of two layers that saves these requests, each to a peer of its name: how long it waits, in seconds."""
        every = {name: SimpleNamespace(remote_host=name, remote_handshake_port=1) for name in requests}
        metadata, began = SimpleNamespace(reqs_to_save=every), self.now
        for _ in range(2):
            self.save_kv_layer(lambda saved: self.saved.extend(saved.reqs_to_save), self, metadata)
        assert metadata.reqs_to_save is every
        return self.now - began


def test_a_write_that_fails_after_its_request_was_given_up_is_not_reported_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second report would be of the next request with its id: the scheduler would free what that one still sends."""
    monkeypatch.setitem(sys.modules, patch.ENGINE, SimpleNamespace(logger=SimpleNamespace(exception=lambda text: None)))
    worker = Worker(monkeypatch)
    monkeypatch.setattr(patch, "time", time)
    writer = SimpleNamespace(worker=worker)
    execute = patch.wrappers(worker.context)[f"{patch.ENGINE}:MoRIIOWriter._execute_write_task"]
    tasks = [
        SimpleNamespace(request_id="one", transfer_id="one", dst_engine_id="peer", enqueue_time=time.perf_counter())
        for _ in range(2)
    ]

    def fails(task: Any) -> None:
        if task is tasks[0]:  # while this one is being written, the request's other write fails
            execute(fails, writer, tasks[1])
        raise OSError(f"no route to {task.dst_engine_id}")

    execute(fails, writer, tasks[0])
    assert worker.moriio_wrapper.done_req_ids == ["one"]
    assert worker.context.counters == {"write_failed": 1}


@pytest.mark.parametrize("aside", [False, True])
def test_an_engine_that_is_dropped_is_collected(aside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be put back where the patch stands aside does not hold it, and is not missed."""
    worker = Worker(monkeypatch, silent=math.inf)
    worker.layers("silent")
    context = worker.context
    dropped: list[weakref.ref[Any]] = [weakref.ref(worker), weakref.ref(worker.moriio_wrapper)]
    monkeypatch.undo()  # the clock and the events are the worker's
    if aside:
        context.withdraw()
        assert type(worker._ready_requests) is queue.Queue
    del worker
    gc.collect()
    assert [ref() for ref in dropped] == [None, None]
    context.withdraw()


def test_the_thread_of_an_engine_that_is_gone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stock it looks for writes for ever, and asks for its worker only where there is one."""

    class Writer(SimpleNamespace):
        @property
        def worker(self) -> Any:
            raise RuntimeError("Parent worker has been garbage collected")

    context = Worker(monkeypatch).context
    process = patch.wrappers(context)[f"{patch.ENGINE}:MoRIIOWriter._process_deferred_tasks"]
    looked: list[int] = []
    process(lambda: looked.append(1), Writer(_deferred_tasks=[], _write_task_q=queue.Queue()))
    assert looked == [1]


def test_peers_that_are_silent_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release shakes hands with one after another; the model waits for all of them as long as for one."""
    worker = Worker(monkeypatch, a=math.inf, b=math.inf, c=math.inf)
    assert worker.layers("a", "b", "c") == 10.0
    assert (worker.moriio_wrapper.done_req_ids, worker.saved) == (["a", "b", "c"], [])
    assert worker.context.counters == {"handshake_timeout": 3}


def test_a_peer_that_answers_is_served_beside_one_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, answers=0.5, silent=math.inf, late=0.5, last=0.5, another=math.inf)
    assert worker.layers("answers", "silent", "late") == 10.0
    assert (worker.moriio_wrapper.done_req_ids, worker.saved) == (["silent", "late"], ["answers", "answers"])
    assert worker.layers("late", "answers") == 1.0, "the silent one's handshake ends first, then late's"
    assert worker.saved[2:] == ["late", "answers"] * 2
    assert worker.layers("silent", "last") == 10.0
    assert worker.layers("another", "last") == 10.0, "it answers while another is waited for"
    assert worker.saved[6:] == ["last"] * 2


def test_silent_peers_that_are_asked_for_in_each_step_do_not_keep_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A handshake that is under way, or in the queue, is not begun again; one that has ended is."""
    worker = Worker(monkeypatch, a=math.inf, b=math.inf, answers=0.5)
    assert [worker.layers("a", "b") for _ in range(4)] == [10.0] * 4
    assert [worker.layers("answers") for _ in range(2)] == [10.0, 0.5], "one that has begun is waited for"
    assert worker.saved == ["answers"] * 2
    assert worker.begun == ["a", "b", "a", "b", "a", "answers"]


def test_a_peer_of_several_ranks_is_waited_for_until_hands_are_shaken_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's is known before: the release would spin for the rest."""
    worker = Worker(monkeypatch, answers=2.5)
    worker._remote_agents["answers:1"] = "the first one's agent"
    assert (worker.layers("answers"), worker.begun) == (2.5, ["answers"])


# Waits for transfers


class Status:
    """A transfer that ends at a time, well or not."""

    def __init__(self, clock: Clock, ends: float = math.inf, *, well: bool = True) -> None:
        self.clock, self.ends, self.well = clock, ends, well

    def Succeeded(self) -> bool:
        return self.well and self.clock.now >= self.ends

    def Failed(self) -> bool:
        return not self.well and self.clock.now >= self.ends


class Clock:
    """Stands in for the module `time`: who sleeps lets it go on."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += max(seconds, 1e-6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(patch, "time", found)
    return found


def test_a_wait_ends_with_the_last_transfer(clock: Clock) -> None:
    assert patch.wait_for([Status(clock, 0.3), Status(clock, 0.1)], 1.0) == (0, None)
    assert clock.now == pytest.approx(0.3, abs=0.01)


def test_a_wait_ends_with_its_time(clock: Clock) -> None:
    never = [Status(clock), Status(clock)]
    assert patch.wait_for([Status(clock, 0.1), *never], 1.0) == (2, None)
    assert clock.now == pytest.approx(1.0, abs=0.01)


def test_a_wait_ends_soon_after_a_transfer_has_failed_behind_one_that_is_pending(clock: Clock) -> None:
    failed = Status(clock, 0.1, well=False)
    assert patch.wait_for([Status(clock), failed, Status(clock)], 10.0) == (2, failed)
    assert 0.1 <= clock.now < 0.2


# Writes that wait for their peer


def test_a_write_is_given_up_once_its_peer_has_named_no_blocks_for_the_time(clock: Clock) -> None:
    clock.now = 100.0
    options = {"HANDSHAKE_SECONDS": 1.0, "TRANSFER_SECONDS": 1.0, "DEFER_SECONDS": 1.0}
    livepatch = PatchContext("moriio-timeouts", options, {}, lambda: None)
    wrapper = patch.wrappers(livepatch)[f"{patch.ENGINE}:MoRIIOWriter._process_deferred_tasks"]
    engine = Wrapper(lock=threading.Lock(), done_remote_allocate_req_dict={}, done_req_ids=[], transfer_status=[])

    def task(name: str, since: float) -> Any:
        return SimpleNamespace(request_id=name, transfer_id=name, enqueue_time=since, dst_engine_id="decode")

    old, new, ready = task("old", 98.9), task("new", 99.1), task("ready", 98.9)
    writer = SimpleNamespace(
        _deferred_tasks=[old, new, ready],
        worker=SimpleNamespace(moriio_wrapper=engine),
        _is_remote_ready=lambda task: task is ready,
        _write_task_q=queue.Queue(),
    )
    wrapper(lambda: None, writer)
    assert writer._deferred_tasks == [new, ready]
    assert engine.done_req_ids == ["old"], "its blocks come back"
    assert livepatch.counters == {"deferred_expired": 1}
    ended = vars(engine)["_livepatch_writes"].ended
    ended.update(reported=99.0, new=99.0)
    wrapper(lambda: None, writer)
    assert ended == {"old": math.inf, "new": 99.0}, "of a write that is deferred, and of none other that was reported"


def test_a_decode_engine_may_queue_for_minutes_before_it_names_its_blocks(clock: Clock) -> None:
    """One that comes after its write was given up waits for its KV until its client goes, which stock would write."""
    defaults = {option.name.upper(): option.default for option in catalogue.load()["moriio-timeouts"].patch.options}
    livepatch = PatchContext("moriio-timeouts", defaults, {}, lambda: None)
    wrapper = patch.wrappers(livepatch)[f"{patch.ENGINE}:MoRIIOWriter._process_deferred_tasks"]
    task = SimpleNamespace(request_id="one", transfer_id="one", enqueue_time=0.0, dst_engine_id="decode")
    engine = Wrapper(lock=threading.Lock(), done_req_ids=[])
    writer = SimpleNamespace(
        _deferred_tasks=[task],
        _write_task_q=queue.Queue(),
        _is_remote_ready=lambda task: False,
        worker=SimpleNamespace(moriio_wrapper=engine),
    )
    clock.now = 300.0
    wrapper(lambda: None, writer)
    assert (writer._deferred_tasks, engine.done_req_ids) == ([task], [])
