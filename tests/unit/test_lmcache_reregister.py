"""`lmcache-reregister`: what a heartbeat notes of the registration. A server that forgets, and contents, are in tests/releases."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.lmcache_reregister import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext

SILENT = 30.0


class Transfers:
    """A transfer context: each registration makes one."""


class Worker:
    """A worker's adapter, registered at the time 0, and its heartbeat."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(patch, "clock", lambda: self.now)
        self.context = PatchContext("lmcache-reregister", {"SILENT_SECONDS": SILENT}, {}, lambda: None)
        self.targets = patch.wrappers(self.context)
        self.transfer_ctx: Any = Transfers()
        self.registered = 0
        self._heartbeat_interval = 10.0
        self.health = self._health_event = threading.Event()
        self.health.set()
        self.register(0.0)

    def register(self, seconds: float) -> None:
        """It registers, and hears that it is registered after so many seconds."""
        self.targets[f"{patch.ADAPTER}.register_kv_caches"](lambda: setattr(self, "now", seconds), self)
        self.known: patch.Registration = getattr(self, patch._STATE)

    @property
    def is_healthy(self) -> bool:
        return self._health_event.is_set()

    def _ensure_heartbeat_started(self) -> None: ...

    def recover(self) -> bool:
        self.registered += 1
        self.transfer_ctx = Transfers()
        return True

    def beat(self, now: float, answered: bool = True) -> None:
        """One heartbeat, as LMCache's own: it registers a worker that it had lost."""
        self.now = now

        def ping() -> None:
            assert self.known.beating.locked(), "another one would register the worker at the same time"
            lost = not self.health.is_set()
            (self.health.set if answered else self.health.clear)()
            if answered and lost:
                self.recover()

        beat = SimpleNamespace(_recover_callback=self.recover, _health_event=self.health)
        self.targets[f"{patch.MODULE}:HeartbeatThread._execute"](ping, beat)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


def test_heartbeats_that_are_rare_leave_no_doubt(worker: Worker) -> None:
    worker._heartbeat_interval = 60.0
    worker.register(0.0)
    worker.now = 179.0
    assert not worker.known.in_doubt()
    worker.now = 181.0
    assert worker.known.in_doubt()


def test_a_ping_that_is_not_answered_says_nothing_of_the_registration(worker: Worker) -> None:
    """Nor is a server that is gone asked to register anybody."""
    worker.beat(15.0, answered=False)
    worker.now = SILENT + 1.0
    assert worker.known.in_doubt()
    worker.beat(SILENT + 2.0, answered=False)
    assert worker.registered == 0
    worker.beat(SILENT + 3.0)
    assert (worker.registered, worker.known.renewed, worker.known.in_doubt()) == (1, 1, False)


def test_a_ping_that_is_answered_in_time_is_enough(worker: Worker) -> None:
    for now in (15.0, 30.0, 45.0):
        worker.beat(now)
    assert (worker.registered, worker.known.renewed) == (0, 0)
    worker.beat(45.0 + SILENT + 1.0)
    assert (worker.registered, worker.known.renewed) == (1, 1)


def test_of_earlier_registrations_none_is_remembered_that_nobody_keeps(worker: Worker) -> None:
    kept = []
    for number in range(1, 4):
        kept.append(worker.transfer_ctx)
        worker.beat(number * (SILENT + 1.0))
    assert [earlier() for earlier in worker.known.earlier] == kept
    kept.clear()
    worker.beat(4 * (SILENT + 1.0))
    assert len(worker.known.earlier) == 1, "which this heartbeat has just left"


def test_what_has_no_event_is_left_out_though_the_server_is_back_meanwhile(worker: Worker) -> None:
    """LMCache makes none while the server is gone. The next step's stores and loads have one."""
    store, event = (
        worker.targets[f"{patch.ADAPTER}.{name}"] for name in ("submit_store_request", "create_recorded_event")
    )
    asked: list[bool] = []
    for healthy in (False, True):
        (worker.health.set if healthy else worker.health.clear)()
        event(lambda: None, worker)
        worker.health.set()
        store(lambda name: asked.append(worker.is_healthy), worker, "a")
    assert asked == [False, True]
    assert worker.context.counters == {"left_out": 1}, "LMCache left the event out itself"


def test_a_server_that_is_gone_is_not_asked_by_a_step(worker: Worker) -> None:
    """The step would wait for it: that is the heartbeat's business."""
    worker.beat(SILENT + 1.0, answered=False)
    asked: list[bool] = []
    worker.targets[f"{patch.ADAPTER}.submit_store_request"](lambda: asked.append(worker.is_healthy), worker)
    assert (asked, worker.known.asking, worker.context.counters) == ([False], None, {})


def test_the_silence_begins_when_the_registration_was_sent(worker: Worker) -> None:
    worker.register(SILENT + 1.0)
    assert worker.known.in_doubt()


@pytest.mark.parametrize(
    ("seconds", "asked"), [(SILENT + 1.0, True), (3599.0, True), (3601.0, False), (3600.0 + SILENT, False)]
)
def test_a_worker_that_sent_no_ping_yet_waits_a_second_and_is_served(
    seconds: float, asked: bool, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server keeps it for an hour. Whether it answers the first ping or not, it is to register again."""
    monkeypatch.setattr(patch, "threading", SimpleNamespace(Thread=Asking, Event=threading.Event))
    adapter: Any = worker
    adapter._heartbeat = SimpleNamespace(_execute=lambda: None)
    served: list[bool] = []

    def submit() -> None:
        served.append(worker.is_healthy)

    worker.now = seconds
    store = worker.targets[f"{patch.ADAPTER}.submit_store_request"]
    store(submit, worker)
    asking: Any = worker.known.asking
    assert asking.joined == [1.0]
    worker.known.first_ping = worker.known.answered if not asked else seconds
    worker.now += SILENT - 1.0
    store(submit, worker)
    worker.now += 2.0
    store(submit, worker)
    assert served == [asked, asked, False], "from the first ping on the server keeps it for no longer than others"
    worker.beat(worker.now + 1.0)
    assert (worker.registered, worker.known.forgotten()) == (1, False)
    assert not worker.context.aside


def test_when_the_first_ping_was_sent_is_noted_once(worker: Worker) -> None:
    worker.beat(100.0, answered=False)
    worker.beat(120.0, answered=False)
    assert (worker.known.first_ping, worker.known.in_doubt(), worker.known.forgotten()) == (100.0, True, False)
    worker.now = 0.0
    worker.register(0.0)
    worker.beat(3601.0, answered=False)
    assert (worker.known.first_ping, worker.known.forgotten()) == (0.0, True)


def test_a_worker_that_has_registered_again_is_known(worker: Worker) -> None:
    """Its stores and loads are asked for again, and the next heartbeat registers nobody."""
    worker.beat(SILENT + 1.0)
    assert (worker.registered, worker.known.in_doubt()) == (1, False)
    worker.beat(SILENT + 2.0)
    assert worker.registered == 1


class Ends:
    """A load's future."""

    def __init__(self, ended: bool) -> None:
        self.ended = ended

    def query(self) -> bool:
        return self.ended

    def result(self, timeout: float | None = None) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "future", "lost"),
    [
        (SILENT + 1.0, Ends(True), {5, 6}),
        (SILENT + 1.0, Ends(False), set()),  # the server copies, and its answer will say how it went
        (SILENT + 1.0, None, set()),  # not begun
        (SILENT - 1.0, Ends(True), set()),
    ],
)
def test_a_load_that_the_worker_copied_while_it_may_have_been_forgotten_has_failed(
    worker: Worker, seconds: float, future: Ends | None, lost: set[int]
) -> None:
    adapter: Any = worker
    adapter.retrieve_futures, adapter.error_block_ids = {}, set()
    worker.beat(0.0)

    def retrieve(request_id: str) -> None:
        worker.now = seconds
        if future is not None:
            adapter.retrieve_futures[request_id] = (future, [5, 6], "more")

    worker.targets[f"{patch.ADAPTER}.submit_retrieve_request"](retrieve, worker, "one")
    assert adapter.error_block_ids == lost
    assert worker.context.counters == ({"load_in_doubt": 1} if lost else {})
    assert not worker.context.aside
    if future is not None:
        kept, *rest = adapter.retrieve_futures["one"]
        assert (kept.result(), rest) == (not lost, [[5, 6], "more"])


@pytest.mark.parametrize("needed", [True, False])
def test_stores_of_earlier_registrations_end_before_their_blocks_are_overwritten(worker: Worker, needed: bool) -> None:
    flushed: list[str] = []
    first, second = Transfers(), Transfers()
    for name, context in (("first", first), ("second", second)):
        context.flush_inflight_stores = lambda name=name: flushed.append(name)  # type: ignore[attr-defined]
        worker.transfer_ctx = context
        worker.beat(worker.now + SILENT + 1.0)
    del context, second
    worker.transfer_ctx = Transfers()
    worker.targets[f"{patch.ADAPTER}.handle_preemptions"](lambda needed: None, worker, needed)
    assert flushed == (["first"] if needed else []), "of the second nobody keeps any stores"
    assert not worker.context.aside


class Asking:
    """A heartbeat, in a thread of its own, that a server does not answer."""

    def __init__(self, target: Any = None, daemon: bool = False) -> None:
        self.joined: list[float | None] = []

    def start(self) -> None: ...

    def is_alive(self) -> bool:
        return True

    def join(self, timeout: float | None = None) -> None:
        self.joined.append(timeout)


def test_a_step_waits_a_second_once_and_a_shutdown_until_the_server_is_asked_no_more(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache itself waits five seconds for its own heartbeat."""
    monkeypatch.setattr(patch, "threading", SimpleNamespace(Thread=Asking, Event=threading.Event))
    adapter: Any = worker
    adapter._heartbeat = SimpleNamespace(_execute=lambda: None)
    shutdown = worker.targets[f"{patch.ADAPTER}.shutdown"]
    shutdown(lambda: None, worker)  # nobody was asked yet
    worker.now = SILENT + 1.0
    for _ in range(2):
        worker.targets[f"{patch.ADAPTER}.submit_store_request"](lambda: None, worker)
    asking: Any = worker.known.asking
    assert asking.joined == [1.0]
    shutdown(lambda: None, worker)
    assert asking.joined == [1.0, 5.0]
    assert not worker.context.aside
