"""`lmcache-bounded-waits`: a store that the server made room for too late, and a heartbeat's pauses.

Its waits are in tests/releases.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.lmcache_bounded_waits import wrappers as patch
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext

POOL, ANOTHER = (os.open(file, os.O_RDONLY) for file in (__file__, os.__file__))
"""Two files, in the place of two servers' shared memory."""


def mapped(pool: int) -> SimpleNamespace:
    """As a SharedMemory is."""
    return SimpleNamespace(_fd=pool)


class EngineDrivenTransferContext:
    """By its name the patch tells that a worker copies in the step. It has a server's pool mapped."""

    def __init__(self, pool: int = POOL) -> None:
        self._engine_driven_context = SimpleNamespace(_shm=mapped(pool))


class Adapter:
    """A worker whose server is back, and has made room for one store."""

    def __init__(self) -> None:
        self.context = PatchContext("lmcache-bounded-waits", {"SECONDS": 30.0, "PING_SECONDS": 1.0}, {}, lambda: None)
        self.transfer_ctx = EngineDrivenTransferContext()
        self.health = threading.Event()
        self.room = [SimpleNamespace(copy_=lambda chunk: self.filled.append(chunk))]
        self.filled: list[Any] = []
        self.committed: Callable[[], None] = lambda: None
        self.late = patch.Late(
            SimpleNamespace(
                query=lambda: True,
                result=lambda: SimpleNamespace(context={"slots": ["a slot"], "chunk_indices": [1]}),
            ),
            SimpleNamespace(
                _build_slot_tensors=lambda slots: self.room,
                commit_store=lambda *asked: self.committed(),
                mq_timeout=0.0,
                _shm=mapped(POOL),
            ),
        )
        self.late.stored, self.late.chunks = ("key", 7), ["first", "second"]
        self.wait_for(self.late)

    def wait_for(self, *late: Any) -> None:
        setattr(self, patch._LATE, list(late))

    def recover(self) -> bool:
        return True

    def beat(self, answered: bool = True) -> None:
        beat = SimpleNamespace(
            _recover_callback=self.recover,
            _health_event=self.health,
            _interval=10.0,
            _wake_event=threading.Event(),
        )
        patch.wrappers(self.context)[f"{patch.MODULE}:HeartbeatThread._execute"](
            lambda: beat._health_event.set() if answered else None, beat
        )


def test_a_late_store_is_filled_once() -> None:
    """Also if a step gives another store up while the first is being committed."""
    adapter = Adapter()
    adapter.committed = lambda: adapter.wait_for(*getattr(adapter, patch._LATE))
    adapter.beat()
    adapter.beat()
    assert adapter.filled == ["second"]
    assert adapter.context.counters == {"stored_late": 1}


def test_a_server_that_had_all_of_it_is_sent_nothing() -> None:
    """It might take that for the end of another store by the same name."""
    adapter = Adapter()
    logged: list[str] = []
    adapter.committed = lambda: logged.append("filled")
    adapter.late.answer.result = lambda: SimpleNamespace(context={"slots": [], "chunk_indices": []})
    adapter.beat()
    assert (adapter.late.over, logged) == (True, [])


def test_a_late_store_is_not_waited_for_as_a_step_is() -> None:
    """The heartbeat is: it is to find the server again."""
    adapter = Adapter()
    waits: list[float] = []
    context = adapter.late.context
    adapter.committed = lambda: waits.append(context.mq_timeout)
    adapter.beat()
    assert waits == [patch.BACK_SECONDS]


@pytest.mark.parametrize("call", ["maybe_submit_lookup_request", "check_lookup_result", "end_session"])
def test_lmcaches_own_clock_ends_a_lookup(call: str) -> None:
    """From 0.5.5 on no step waits for one: a busy server may take as long as on stock."""
    adapter: Any = Adapter()
    adapter._mq_timeout, adapter._heartbeats = 300.0, None
    wrapper = patch.wrappers(adapter.context)[f"{patch.SCHEDULER}.{call}"]
    assert wrapper(lambda: adapter._mq_timeout, adapter) == 300.0


def test_a_late_store_waits_for_a_server_that_is_well() -> None:
    """One that has made room and is lost again would not answer that it was filled."""
    adapter = Adapter()
    adapter.beat(answered=False)
    assert adapter.filled == []
    adapter.beat()
    assert adapter.filled == ["second"]


@pytest.mark.parametrize(("silent", "filled"), [(19.0, ["second"]), (21.0, [])])
def test_after_a_long_silence_the_room_may_be_anothers(
    monkeypatch: pytest.MonkeyPatch, silent: float, filled: list[str]
) -> None:
    """The server forgets a worker that is stopped, and gives its room to others."""
    adapter = Adapter()
    now = adapter.late.heard
    for after in (10.0, 10.0 + silent):  # not the whole time counts: it is heard of in between
        monkeypatch.setattr(patch, "clock", lambda after=after: now + after)
        adapter.late.answer.query = lambda after=after: after > 10.0
        adapter.beat()
    adapter.beat()
    assert adapter.filled == filled
    assert (adapter.late.context, adapter.late.chunks) == (None, [])


@pytest.mark.parametrize("answered", [False, True])
def test_of_a_server_that_was_restarted_nothing_is_kept(answered: bool) -> None:
    """Its pool's memory would stay for as long as it is mapped. Nor is anything said to be filled: the room that an
    answer tells of, if the other server gave it, is in that one's pool."""
    adapter = Adapter()
    logged: list[str] = []
    adapter.committed = lambda: logged.append("filled")
    adapter.late.answer.query = lambda: False
    adapter.beat()
    assert adapter.late.chunks, "it waits"
    adapter.late.answer.query = lambda: answered
    adapter.transfer_ctx = EngineDrivenTransferContext(ANOTHER)
    adapter.beat()
    assert (adapter.late.context, adapter.late.chunks, adapter.filled, logged) == (None, [], [], [])


@pytest.mark.parametrize("slots", [0, 2])
def test_where_the_server_made_another_room_than_was_asked_for_nothing_is_reported_as_filled(slots: int) -> None:
    """Whoever reads it would read what was in that memory before."""
    adapter = Adapter()
    committed: list[str] = []
    adapter.committed = lambda: committed.append("filled")
    adapter.room = adapter.room * slots
    with pytest.raises(ValueError, match=r"zip\(\)"):
        adapter.late.fill()
    assert committed == []


def test_a_worker_that_shuts_down_fills_nothing() -> None:
    """LMCache's heartbeat may still be in its last ping."""
    adapter = Adapter()
    adapter.transfer_ctx = None  # type: ignore[assignment]
    adapter.health.set()
    adapter.beat()
    assert (adapter.filled, adapter.context.aside) == ([], False)


class Shared:
    """A worker's context over shared memory."""

    _shm = mapped(POOL)


class Stores:
    """A worker's two calls of each store, over shared memory; the first gets no answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, patch.MODULE, SimpleNamespace(send_ping=lambda *_: False))
        self.context = PatchContext("lmcache-bounded-waits", {"SECONDS": 0.1, "PING_SECONDS": 1.0}, {}, lambda: None)
        self.targets = patch.wrappers(self.context)
        self.logged: list[Any] = []
        adapter: Any = Adapter()
        adapter._mq_timeout, adapter.mq_client, adapter._health_event = 1.0, "a client", adapter.health
        self.adapter = adapter

    def store(self, step: Callable[[], None]) -> None:
        self.targets[f"{patch.WORKER}.submit_store_request"](lambda: step(), self.adapter)

    def prepare(self) -> None:
        future = SimpleNamespace(is_done_=SimpleNamespace(wait=lambda timeout: False))
        self.targets["lmcache.v1.multiprocess.futures:MessagingFuture.__init__"](lambda: None, future)

        def times_out(*_: Any) -> None:
            assert not future.is_done_.wait(0.1)
            raise TimeoutError

        assert self.targets[f"{patch.SHARED}.prepare_store"](times_out, Shared(), "key", 7) is None

    def commit(self) -> Any:
        release = lambda *asked: self.logged.append(asked)  # noqa: E731
        commit = guard.around(release, self.targets[f"{patch.SHARED}.commit_store"], self.context, "", of=Shared())
        return commit("key", 7, ["a chunk"])


def test_a_patch_that_stands_aside_within_a_store_does_not_say_that_it_is_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server makes room for it later."""
    stores = Stores(monkeypatch)

    def step() -> None:
        stores.prepare()
        stores.context.withdraw()
        assert stores.commit() is False

    stores.store(step)
    assert stores.logged == []
    stores.commit()  # of another one, whose room was made late, and is filled now
    assert stores.logged == [("key", 7, ["a chunk"])]


def test_the_last_two_stores_that_were_given_up_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps a copy of what is to be stored. The first one's server may be gone, the second one's not."""
    stores = Stores(monkeypatch)
    kept = []

    def step() -> None:
        stores.prepare()
        stores.commit()

    for _ in range(3):
        stores.store(step)
        kept.append(getattr(stores.adapter, patch._LATE)[:])
    assert [len(late) for late in kept] == [2, 2, 2], "the first was there before"
    assert kept[2][0] is kept[1][1]


def test_every_server_of_a_scheduler_is_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not is not waited for any longer, though the others live. A wait without an end of its own has SECONDS."""
    stores = Stores(monkeypatch)
    stores.adapter._heartbeats, stores.adapter.mq_clients = None, {"one": 1, "another": 2}
    module = SimpleNamespace(send_ping=lambda client, timeout: client == 1)
    monkeypatch.setitem(sys.modules, patch.MODULE, module)
    waits: list[float] = []

    def wait(timeout: float) -> bool:
        waits.append(timeout)
        return len(waits) > 1

    def look_up() -> bool:
        future = SimpleNamespace(is_done_=SimpleNamespace(wait=wait))
        stores.targets["lmcache.v1.multiprocess.futures:MessagingFuture.__init__"](lambda: None, future)
        return bool(future.is_done_.wait())

    answered = stores.targets[f"{patch.SCHEDULER}.check_lookup_result"](look_up, stores.adapter)
    assert (answered, waits) == (True, [0.1, 0.0]), "it came at last"


def test_a_store_that_ended_with_an_error_says_nothing_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = Stores(monkeypatch)

    def fails() -> None:
        stores.prepare()
        raise MemoryError

    with pytest.raises(MemoryError):
        stores.store(fails)
    stores.store(lambda: stores.commit())
    assert stores.logged == [("key", 7, ["a chunk"])]


class Waking:
    """A heartbeat's event, and its clock: both are told what happens when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.happens: dict[float, Callable[[], None]] = {}
        self.is_set = False
        monkeypatch.setattr(patch, "time", SimpleNamespace(monotonic=lambda: self.now))

    def wait(self, timeout: float) -> bool:
        self.waits.append(timeout)
        for when in sorted(self.happens):
            if self.now < when <= self.now + timeout:
                self.happens.pop(when)()
                if self.is_set:
                    self.now = when
                    return True
        self.now += timeout
        return self.is_set


class Beat:
    """A scheduler's heartbeat, every 10 s."""

    def __init__(self, event: Waking, name: str = "_wake_event") -> None:
        self._recover_callback: Callable[[], bool] = lambda: True
        self._health_event = threading.Event()
        self._health_event.set()
        self._interval = 10.0
        vars(self)[name] = event
        self._mq_client = "a client"  # to 0.5.4
        self.event = event
        options = {"SECONDS": 30.0, "PING_SECONDS": 1.0}
        self.targets = patch.wrappers(PatchContext("lmcache-bounded-waits", options, {}, lambda: None))
        self.answered = True
        self.messages: list[Any] = []
        self.timeouts: list[float] = []

    def execute(self) -> None:
        """One ping, whose future LMCache makes."""
        self.targets[f"{patch.MODULE}:HeartbeatThread._execute"](self.send, self)

    def send(self) -> None:
        self.timeouts.append(self._interval)
        answered = [self.answered]
        future = SimpleNamespace(query=lambda: answered[0], answer=lambda: answered.__setitem__(0, True))
        self.targets["lmcache.v1.multiprocess.futures:MessagingFuture.__init__"](lambda: None, future)
        self.messages.append(future)
        (self._health_event.set if self.answered else self._health_event.clear)()

    def pause(self) -> float:
        """How long LMCache's loop waits for its event, in seconds, as it does after each ping."""
        began = self.event.now
        self.ends = self.event.wait(timeout=self._interval)
        return self.event.now - began


@pytest.fixture(params=["_wake_event", "_stop_event"])
def beat(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Beat:
    return Beat(Waking(monkeypatch), request.param)


def test_a_healthy_server_is_pinged_at_the_releases_own_interval(beat: Beat) -> None:
    beat.execute()
    assert (beat.pause(), beat.ends) == (10.0, False)
    assert (beat.timeouts, beat._interval) == ([5.0], 10.0)


def test_where_no_step_waits_for_it_a_busy_server_has_the_time_that_it_has_on_stock(beat: Beat) -> None:
    """From 0.5.5 on. One that is lost, and answers a ping late, is not lost for good."""
    del beat._mq_client
    beat.execute()
    beat.answered = False
    beat.execute()
    beat.messages[-1].answer()
    beat.execute()
    beat.execute()
    assert beat.timeouts == [10.0, 10.0, 10.0, 2.0]


def test_a_lost_server_is_pinged_each_second_until_it_is_back(beat: Beat) -> None:
    beat.answered = False
    seen = []
    for beat.answered in (False, False, True, True):
        beat.execute()
        seen.append(beat.pause())
    assert seen == [1.0, 1.0, 10.0, 10.0]
    assert beat.timeouts == [5.0, 2.0, 2.0, 5.0]


def test_a_server_that_is_lost_between_two_pings_is_not_waited_for(beat: Beat) -> None:
    beat.execute()
    beat.event.happens[3.5] = beat._health_event.clear
    assert (beat.pause(), beat.ends) == (4.0, False)


def test_a_pause_ends_with_the_heartbeat(beat: Beat) -> None:
    beat.answered = False
    beat.execute()
    beat.event.happens[0.5] = lambda: setattr(beat.event, "is_set", True)
    assert (beat.pause(), beat.ends) == (0.5, True)


def test_an_interval_that_is_less_than_ours_stays(beat: Beat) -> None:
    beat._interval = 0.2
    beat.answered = False
    pauses = []
    for _ in range(2):
        beat.execute()
        pauses.append(beat.pause())
    assert (beat.timeouts, pauses) == ([0.2, 0.2], [0.2, 0.2])


def test_a_heartbeat_that_is_to_end_is_not_paused_first(beat: Beat) -> None:
    beat.execute()
    beat._interval, beat.event.is_set = 0.0, True
    assert (beat.pause(), beat.ends) == (0.0, True)


def test_pings_do_not_pile_up(beat: Beat) -> None:
    """LMCache's queue to a server that is gone has no end of its own."""
    beat.answered = False
    pauses = []
    for _ in range(patch.UNANSWERED + 10):
        beat.execute()
        pauses.append(beat.pause())
    assert pauses == [1.0] * (patch.UNANSWERED - 1) + [10.0] * 11
    assert len(vars(beat)[patch._PINGS].unanswered) == patch.UNANSWERED
    beat.messages[-1].answer()  # one that was sent while it was gone: it is back
    assert beat.pause() == 1.0
    beat.execute()  # and is gone again
    assert beat.pause() == 10.0
    for beat.answered, pause in ((True, 10.0), (False, 1.0)):
        beat.execute()
        assert beat.pause() == pause


@pytest.mark.parametrize("tells", [True, False])
def test_time_in_which_the_machine_was_suspended_counts_where_the_clock_has_it(
    tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's server, on another machine, did not sleep meanwhile."""
    clocks = {"boot": 500.0}
    known: dict[str, Any] = {"CLOCK_BOOTTIME": "boot", "clock_gettime": clocks.__getitem__} if tells else {}
    monkeypatch.setattr(patch, "time", SimpleNamespace(monotonic=lambda: 20.0, **known))
    assert patch.clock() == (500.0 if tells else 20.0)


def test_the_waits_of_step_after_step_for_a_server_that_lives_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers pings, and nothing else. Time without such waits restores what a step may wait."""
    now = [0.0]
    monkeypatch.setattr(patch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setitem(sys.modules, patch.MODULE, SimpleNamespace(send_ping=lambda *_: True))
    livepatch = PatchContext("lmcache-bounded-waits", {"SECONDS": 3.0, "PING_SECONDS": 1.0}, {}, lambda: None)
    targets = patch.wrappers(livepatch)
    adapter = SimpleNamespace(_heartbeats=None, _mq_timeout=300.0, mq_client="a client")

    def passes(timeout: float) -> bool:
        now[0] += timeout
        return False

    def ask() -> None:
        future = SimpleNamespace(is_done_=SimpleNamespace(wait=passes))
        targets["lmcache.v1.multiprocess.futures:MessagingFuture.__init__"](lambda: None, future)
        assert not future.is_done_.wait()

    def step() -> float:
        began = now[0]
        targets[f"{patch.SCHEDULER}.check_lookup_result"](ask, adapter)
        return now[0] - began

    assert [step(), step()] == [3.0, patch.PAUSE_SECONDS]
    now[0] += 3.5
    assert step() == 3.0
    assert not livepatch.aside
