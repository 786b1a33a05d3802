"""The lease guard with a stand-in for NIXL's class of agents, for what the real ones do not do when asked to.

The stand-in's transfers copy memory of this process when they are asked for their state, or fail, or never end.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.nixl_lease_guard import lease_table, wrappers
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext

BASE = wrappers.BASES[0]


class Transfer:
    """A transfer: of blocks, where it has no descriptors, or of a table."""

    def __init__(self, here: Any = None, there: Any = None, notification: bytes = b"") -> None:
        self.here, self.there, self.notification = here, there, notification
        self.state = "PROC"
        self.copies = True
        self.busy = False  # NIXL refuses to release it
        self.released = False


class Agent:
    """NIXL's class of agents, as far as a worker uses it."""

    refuses_memory = False

    def __init__(self, name: str, config: Any = None) -> None:
        self.name = name
        self.sent: list[tuple[bytes, bytes]] = []
        self.transfers: list[Transfer] = []
        self.registered: list[Any] = []
        self.unreadable = False
        self.ready: Callable[[Transfer], None] = lambda transfer: None

    def register_memory(self, regions: Any, kind: str) -> None:
        if self.refuses_memory:
            raise RuntimeError("no such backend")
        self.registered += regions

    def add_remote_agent(self, metadata: str) -> bytes:
        return metadata.encode()

    def remove_remote_agent(self, name: bytes) -> None: ...

    def prep_xfer_dlist(self, agent_name: bytes, descriptors: Any) -> int:
        return 7  # an int in older NIXLs, and used again

    def release_dlist_handle(self, handle: int) -> None: ...

    def get_xfer_descs(self, regions: Any, kind: str) -> Any:
        return regions

    def initialize_xfer(self, kind: str, here: Any, there: Any, name: bytes) -> Transfer:
        if self.unreadable:
            raise RuntimeError("no such memory")
        return self.made(Transfer(here, there))

    def make_prepped_xfer(self, kind: str, *sides: Any, notif_msg: bytes = b"") -> Transfer:
        return self.made(Transfer(notification=notif_msg))

    def made(self, transfer: Transfer) -> Transfer:
        self.transfers.append(transfer)
        return transfer

    def transfer(self, transfer: Transfer) -> str:
        self.ready(transfer)
        return self.check_xfer_state(transfer)

    def check_xfer_state(self, transfer: Transfer) -> str:
        if transfer.state == "raises":
            raise ConnectionError
        if transfer.state == "DONE" and transfer.here and transfer.copies:
            ctypes.memmove(transfer.here[0][0], transfer.there[0][0], transfer.here[0][1])
        return transfer.state

    def release_xfer_handle(self, transfer: Transfer) -> None:
        if transfer.busy:
            raise RuntimeError("in progress")
        transfer.released = True

    def send_notif(self, name: bytes, notif_msg: bytes) -> None:
        self.sent.append((name, notif_msg))


class World:
    """A prefill's and a decode's worker, whose agents are the stand-in's, with the patch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: float = 3600.0, hybrid: str = "") -> None:
        kind = type("nixl_agent", (Agent,), dict(vars(Agent)))
        api = ModuleType("nixl._api")
        api.nixl_agent = kind  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nixl._api", api)
        self.agent_class: Any = kind
        facts = {"hybrid": hybrid}
        self.context = PatchContext("nixl-lease-guard", {"CHECK_SECONDS": limit}, facts, lambda: None)
        made = wrappers.wrappers(self.context)

        class Worker:
            def __init__(self, name: str) -> None:
                self.nixl_wrapper = kind(name, None)
                self._reqs_to_process: set[str] = set()
                self._reqs_to_send: dict[str, float] = {}
                self._recving_metadata: dict[str, Any] = {}
                self._invalid_block_ids: Any = set()
                self._is_hma_required = True
                self.delivered: set[str] = set()

            def start_load_kv(self, metadata: Any) -> None:
                self._reqs_to_process |= metadata.reqs_in_batch
                self._reqs_to_process -= metadata.reqs_not_processed

            def _get_new_notifs(self) -> set[str]:
                return self.delivered

            def get_finished(self) -> tuple[set[str], set[str]]:
                return self._get_new_notifs(), set()

            def _read_blocks(self, request_id: str, remote_request_id: str, side: int, kind: str = "READ") -> Any:
                agent = self.nixl_wrapper
                return agent.make_prepped_xfer(kind, 1, [0], side, [0], notif_msg=f"{remote_request_id}:1".encode())

        for name in ("__init__", "start_load_kv", "_get_new_notifs", "get_finished", "_read_blocks"):
            target = f"{BASE}.{name}"
            setattr(Worker, name, guard.in_place_of(vars(Worker)[name], made[target], self.context, target))
        self.worker_class: Any = Worker
        self.prefill: Any = Worker("prefill")
        self.decode: Any = Worker("decode")
        self.agent: Any = self.decode.nixl_wrapper

    @property
    def counters(self) -> dict[str, int]:
        return self.context.counters

    @property
    def table(self) -> lease_table.LeaseTable:
        found = wrappers.guard_of(self.prefill)
        assert found is not None
        return found.table

    def begin(self, *request_ids: str) -> None:
        self.prefill.start_load_kv(SimpleNamespace(reqs_in_batch=set(request_ids), reqs_not_processed=set()))

    def handshake(self) -> int:
        """Decode shakes hands with prefill; the handle of prefill's descriptors."""
        name = self.agent.add_remote_agent(self.prefill.nixl_wrapper.name)
        return int(self.agent.prep_xfer_dlist(name, ()))

    def read(self, request_id: str, side: int | None = None) -> Transfer:
        """Decode reads a request's blocks; they have come."""
        side = self.handshake() if side is None else side
        handle: Transfer = self.decode._read_blocks(
            request_id=f"d-{request_id}", remote_request_id=request_id, side=side
        )
        assert self.agent.check_xfer_state(handle) == "PROC"
        handle.state = "DONE"
        return handle

    def tables_can_be_read(self) -> None:
        """From now on, reads of tables end at once."""

        def ready(transfer: Transfer) -> None:
            transfer.state = "DONE"

        self.agent.ready = ready


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


# The table


def held(table: lease_table.LeaseTable, request_id: str) -> bool:
    """What a reader finds."""
    place = table.address + lease_table.bucket_of(request_id) * lease_table.BUCKET
    return lease_table.held(ctypes.string_at(place, lease_table.BUCKET), request_id)


def test_a_name_says_where_the_lease_table_is() -> None:
    table = lease_table.LeaseTable()
    name = lease_table.name_with("an-agent", table)
    assert name.startswith("an-agent")
    assert lease_table.table_at(name) == lease_table.table_at(name.encode()) == table.address
    assert (
        lease_table.table_at("an-agent")
        is lease_table.table_at(b"an-agent")
        is lease_table.table_at(name + "x")
        is None
    )


def test_a_lease_table_says_what_is_held() -> None:
    table = lease_table.LeaseTable()
    assert not held(table, "a")
    assert table.publish("a")
    assert table.publish("a")  # in another batch
    assert held(table, "a")
    assert not held(table, "b")
    assert table.withdraw("a")
    assert not held(table, "a")
    assert not table.withdraw("a")
    assert table.publish("a")  # it was read, and comes again


def test_an_id_whose_lease_ended_unread_is_not_reported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "REMEMBERED", 2)
    table = lease_table.LeaseTable()
    for name in "abc":
        assert table.publish(name)
        table.withdraw(name, unread=True)
    assert [table.publish(name) for name in "abc"] == [True, False, False]  # the last two are remembered
    assert not held(table, "b")


def test_a_bucket_with_more_leases_than_entries_says_nothing_until_they_fit_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_table, "bucket_of", lambda request_id: lease_table.BUCKETS - 1)
    table = lease_table.LeaseTable()
    names = [str(number) for number in range(lease_table.ENTRIES + 3)]
    fit = lease_table.ENTRIES
    assert all(table.publish(name) for name in names[:fit])
    assert all(held(table, name) for name in names[:fit])
    assert all(table.publish(name) for name in names)
    assert shown(table) == lease_table.ASIDE
    assert table.landed(0) == bytes(lease_table.BUCKET)  # the last bucket ends where the landings begin
    assert table.withdraw("3")
    assert table.withdraw(names[-1])
    assert shown(table) == lease_table.ASIDE
    assert table.withdraw("5", unread=True)
    assert [name for name in names if held(table, name)] == [*"012467", *names[fit : fit + 2]]
    assert not table.publish("5")
    assert all(table.withdraw(name) for name in [*"012467", *names[fit : fit + 2]])
    assert shown(table) == bytes(lease_table.BUCKET)
    assert not table._held


def shown(table: lease_table.LeaseTable) -> bytes:
    """The last bucket, as others read it."""
    return ctypes.string_at(table.address + (lease_table.BUCKETS - 1) * lease_table.BUCKET, lease_table.BUCKET)


# Decode


def test_prefill_hears_when_the_lease_was_seen_to_hold(world: World) -> None:
    world.begin("a")
    handle = world.read("a")
    assert handle.notification == b""  # the read itself tells nothing
    assert world.agent.check_xfer_state(handle) == "PROC"  # the table is being read
    assert world.agent.sent == []
    world.agent.transfers[-1].state = "DONE"
    assert world.agent.check_xfer_state(handle) == "DONE"
    assert world.agent.check_xfer_state(handle) == "DONE"
    assert world.agent.sent == [(world.prefill.nixl_wrapper.name.encode(), b"a:1")]  # once
    world.agent.release_xfer_handle(handle)
    assert all(transfer.released for transfer in world.agent.transfers)
    assert len(wrappers.guard_of(world.decode).table.free_landings) == lease_table.LANDINGS  # type: ignore[union-attr]
    assert world.counters == {"lease_held": 1}


def test_a_lost_lease_is_a_failed_transfer(world: World) -> None:
    world.tables_can_be_read()
    handle = world.read("a")
    assert world.agent.check_xfer_state(handle) == "ERR"
    assert world.agent.sent == []
    assert world.counters == {"lease_lost": 1}


def test_a_transfer_that_failed_is_not_asked_about(world: World) -> None:
    world.begin("a")
    handle = world.read("a")
    handle.state = "ERR"
    count = len(world.agent.transfers)
    assert world.agent.check_xfer_state(handle) == "ERR"
    assert len(world.agent.transfers) == count
    assert world.counters == {}


def test_a_lease_table_that_never_comes_is_waited_for_no_longer_than_set(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, limit=0.0)
    world.begin("a")
    handle = world.read("a")
    assert world.agent.check_xfer_state(handle) == "ERR"
    assert world.counters == {"lease_unknown": 1}
    # It may still write into its landing, so that is given to nobody until NIXL lets it go.
    check = world.agent.transfers[-1]
    check.busy = True
    world.agent.release_xfer_handle(handle)
    free = wrappers.guard_of(world.decode).table.free_landings  # type: ignore[union-attr]
    assert len(free) == lease_table.LANDINGS - 1
    check.busy = False
    world.tables_can_be_read()
    other = world.read("a")
    assert world.agent.check_xfer_state(other) == "DONE"
    world.agent.release_xfer_handle(other)
    assert (len(free), check.released) == (lease_table.LANDINGS, True)


def test_reads_wait_for_a_landing(world: World) -> None:
    world.begin("a", "b")
    decode = wrappers.guard_of(world.decode)
    assert decode is not None
    del decode.table.free_landings[1:]
    first, second = world.read("a"), world.read("b")
    assert [world.agent.check_xfer_state(handle) for handle in (first, second)] == ["PROC", "PROC"]
    world.agent.transfers[-1].state = "DONE"
    assert [world.agent.check_xfer_state(handle) for handle in (first, second)] == ["DONE", "PROC"]
    world.tables_can_be_read()
    world.agent.release_xfer_handle(first)
    assert world.agent.check_xfer_state(second) == "DONE"


def test_landings_come_back_when_looks_that_were_given_up_have_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, limit=0.0)
    world.begin("a", "b")
    decode = wrappers.guard_of(world.decode)
    assert decode is not None
    del decode.table.free_landings[1:]
    first = world.read("a")
    assert world.agent.check_xfer_state(first) == "ERR"
    check = world.agent.transfers[-1]
    check.busy = True
    world.agent.release_xfer_handle(first)
    for name in ("a", "b"):
        handle = world.read(name)
        assert world.agent.check_xfer_state(handle) == "ERR"  # the look could not even be begun
        world.agent.release_xfer_handle(handle)
    check.busy = False
    world.tables_can_be_read()
    assert world.agent.check_xfer_state(world.read("b")) == "DONE"


def fails(handle: Transfer) -> None:
    handle.state = "ERR"


def lost(handle: Transfer) -> None:
    """Its bytes come; the lease has ended."""
    handle.state = "DONE"


@pytest.mark.parametrize("first_ends", [fails, lost])
@pytest.mark.parametrize("second_ends", [fails, lost])
def test_failures_of_one_request_are_reported_in_one_round_of_asking(
    world: World, first_ends: Callable[[Transfer], None], second_ends: Callable[[Transfer], None]
) -> None:
    """From prefill's two ranks: the worker takes the first failure for the end of all."""
    world.tables_can_be_read()
    first, other, second = world.read("a"), world.read("b"), world.read("a")
    second.state = "PROC"
    first_ends(first)
    rounds = [[world.agent.check_xfer_state(handle) for handle in (first, second)] for _ in range(2)]
    second_ends(second)
    rounds.append([world.agent.check_xfer_state(handle) for handle in (first, second)])
    assert rounds == [["PROC", "PROC"]] * 3  # in the last of them the first was asked before the second had ended
    for handle in (first, second):
        assert world.agent.check_xfer_state(handle) == "ERR"
        world.agent.release_xfer_handle(handle)
    assert world.agent.check_xfer_state(other) == "ERR"  # another request's


class Unwalked(dict[Any, Any]):
    """Nobody goes through all of it."""

    values = None  # type: ignore[assignment]


def test_a_read_that_failed_is_compared_with_those_of_its_request_alone(world: World) -> None:
    """Where a prefill engine goes, all reads from it fail in one step."""
    handles = [world.read(f"r{number}") for number in range(3)]
    guard: Any = wrappers.guard_of(world.decode)
    guard._reads = Unwalked(guard._reads)
    for handle in handles:
        handle.state = "ERR"
        assert world.agent.check_xfer_state(handle) == "ERR"
        world.agent.release_xfer_handle(handle)
    assert not guard._readers


def test_a_read_that_was_right_is_reported_beside_one_that_failed(world: World) -> None:
    world.begin("a")
    world.tables_can_be_read()
    first, second = world.read("a"), world.read("a")
    second.state = "PROC"
    assert world.agent.check_xfer_state(first) == "DONE"
    world.agent.release_xfer_handle(first)
    fails(second)
    assert world.agent.check_xfer_state(second) == "ERR"


def test_an_error_of_nixls_is_reported_as_an_error_unless_another_read_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = world.read("a"), world.read("a")
    first.state, second.state = "raises", "PROC"
    assert world.agent.check_xfer_state(first) == "PROC"
    second.state = "raises"
    assert world.agent.check_xfer_state(second) == "PROC"
    for handle in (first, second):
        assert world.agent.check_xfer_state(handle) == "ERR"
        world.agent.release_xfer_handle(handle)
    alone = world.read("a")
    alone.state = "raises"
    with pytest.raises(ConnectionError):
        world.agent.check_xfer_state(alone)
    assert not world.context.aside


def test_what_an_earlier_read_left_does_not_answer(world: World) -> None:
    world.begin("a")
    world.tables_can_be_read()
    decode = wrappers.guard_of(world.decode)
    assert decode is not None
    del decode.table.free_landings[1:]
    first = world.read("a")
    assert world.agent.check_xfer_state(first) == "DONE"
    world.agent.release_xfer_handle(first)

    def nothing(transfer: Transfer) -> None:
        transfer.state, transfer.copies = "DONE", False

    world.agent.ready = nothing
    assert world.agent.check_xfer_state(world.read("a")) == "ERR"


@pytest.mark.parametrize("state", ["ERR", "raises", "cannot be made"])
def test_a_lease_table_that_cannot_be_read_is_a_failed_transfer(
    world: World, state: str, capfd: pytest.CaptureFixture[str]
) -> None:
    world.begin("a")
    handle = world.read("a")

    def ready(transfer: Transfer) -> None:
        transfer.state = "ERR"
        if state == "raises":
            raise RuntimeError("the peer has gone")

    world.agent.ready = ready
    world.agent.unreadable = state == "cannot be made"
    assert world.agent.check_xfer_state(handle) == "ERR"
    world.agent.release_xfer_handle(handle)
    assert len(wrappers.guard_of(world.decode).table.free_landings) == lease_table.LANDINGS  # type: ignore[union-attr]
    assert world.counters == {"lease_unknown": 1}
    assert "counts as a failed load: reading prefill's lease table failed" in capfd.readouterr().err
    assert not world.context.aside


def test_prefill_need_not_be_reached_afterwards(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.begin("a")
    world.tables_can_be_read()

    def raises(agent: Any, name: bytes, notif_msg: bytes) -> None:
        raise RuntimeError("the peer has gone")

    monkeypatch.setattr(world.agent_class, "send_notif", raises)
    assert world.agent.check_xfer_state(world.read("a")) == "DONE"
    assert not world.context.aside


@pytest.mark.parametrize(("hybrid", "expected"), [("", set()), ("set", {3, 4, 5})])
def test_blocks_that_the_release_leaves_out_are_named(
    monkeypatch: pytest.MonkeyPatch, hybrid: str, expected: set[int]
) -> None:
    world = World(monkeypatch, hybrid=hybrid)
    world.tables_can_be_read()
    world.decode._recving_metadata["d-a"] = SimpleNamespace(local_block_ids=([3, 4], [5]))
    handle = world.read("a")
    assert world.agent.check_xfer_state(handle) == "ERR"
    world.agent.release_xfer_handle(handle)
    assert world.decode._invalid_block_ids == expected
    world.decode._invalid_block_ids = set()
    handle = world.read("a")
    handle.state = "ERR"  # NIXL's own failure
    assert world.agent.check_xfer_state(handle) == "ERR"
    world.agent.release_xfer_handle(handle)
    assert world.decode._invalid_block_ids == expected
    del world.decode._recving_metadata["d-a"]  # as where a read of another rank could not be begun
    handle = world.read("a")
    assert world.agent.check_xfer_state(handle) == "ERR"
    world.agent.release_xfer_handle(handle)
    assert not world.context.aside
    world.decode._is_hma_required = False  # such a model's blocks are named by the release itself
    world.decode._invalid_block_ids = set()
    assert world.agent.check_xfer_state(world.read("a")) == "ERR"
    assert world.decode._invalid_block_ids == set()


# Who is asked


@pytest.mark.parametrize("why", ["no table", "unreadable", "gone", "released"])
def test_reads_of_others_are_left_alone(world: World, why: str) -> None:
    name = world.prefill.nixl_wrapper.name
    world.agent.unreadable = why == "unreadable"
    added = world.agent.add_remote_agent("prefill" if why == "no table" else name)
    side = world.agent.prep_xfer_dlist(added, ())
    if why == "gone":
        world.agent.release_dlist_handle(side)
        world.agent.remove_remote_agent(added)
        side = world.agent.prep_xfer_dlist(added, ())
    if why == "released":
        world.agent.release_dlist_handle(side)  # and its number goes to another
    handle = world.decode._read_blocks(request_id="d-a", remote_request_id="a", side=side)
    assert handle.notification == b"a:1"
    handle.state = "DONE"
    assert world.agent.check_xfer_state(handle) == "DONE"
    assert world.counters == ({"peer_unguarded": 1} if why in ("no table", "unreadable") else {})


def test_what_is_no_read_of_a_worker_is_left_alone(world: World) -> None:
    side = world.handshake()
    written = world.decode._read_blocks(request_id="d-a", remote_request_id="a", side=side, kind="WRITE")
    other = world.agent.make_prepped_xfer("READ", 1, [0], side, [0], notif_msg=b"other")
    assert (written.notification, other.notification) == (b"a:1", b"other")
    assert world.agent_class("eplb").name == "eplb"  # an agent that no worker makes


def test_without_memory_for_it_nothing_is_guarded(world: World) -> None:
    world.agent_class.refuses_memory = True
    worker = world.worker_class("third")
    assert wrappers.guard_of(worker) is None
    assert worker._read_blocks(request_id="d-a", remote_request_id="a", side=1).notification == b"a:1"
    worker.start_load_kv(SimpleNamespace(reqs_in_batch={"a"}, reqs_not_processed=set()))
    assert worker.get_finished() == (set(), set())
    assert world.counters == {"unguarded": 1}


# Prefill


def test_a_request_is_in_the_lease_table_while_its_blocks_are_kept(world: World) -> None:
    world.begin("read", "aborted", "ended", "passed", "kept")
    assert all(held(world.table, name) for name in ("read", "aborted", "ended", "passed", "kept"))
    world.prefill.start_load_kv(SimpleNamespace(reqs_in_batch=set(), reqs_not_processed={"aborted"}))
    world.prefill.delivered = {"read"}
    world.prefill._get_new_notifs()
    world.prefill._reqs_to_send = {"kept": time.perf_counter() + 600, "passed": time.perf_counter()}
    world.prefill.delivered = set()
    world.prefill.get_finished()
    names = ("read", "aborted", "passed", "kept", "ended")
    assert [held(world.table, name) for name in names] == [False, False, False, True, True]
    assert world.counters == {"lease_ended": 1}
    world.begin("read", "aborted", "passed")  # their ids are used again
    assert [held(world.table, name) for name in names[:3]] == [True, True, False]
    assert world.counters == {"lease_ended": 1, "not_vouched": 1}


@pytest.mark.parametrize(
    "answer",
    [
        ({"ended"}, {"received"}),
        SimpleNamespace(finished_sending=["ended"], finished_recving=["received"]),  # from 0.30.0
    ],
)
def test_what_the_release_is_about_to_free_is_not_in_the_lease_table(world: World, answer: Any) -> None:
    """Of these nobody has told that it was read: their leases have ended. What was received is nobody's lease."""
    world.begin("ended", "received")
    finished = wrappers.wrappers(world.context)[f"{BASE}.get_finished"]
    assert finished(lambda: answer, world.prefill) is answer
    assert [held(world.table, name) for name in ("ended", "received")] == [False, True]
    assert world.counters == {"lease_ended": 1}


def test_what_was_aborted_in_the_same_step_is_not_in_the_lease_table(world: World) -> None:
    world.prefill.start_load_kv(SimpleNamespace(reqs_in_batch={"a"}, reqs_not_processed={"a"}))
    assert not held(world.table, "a")


def test_a_rank_that_keeps_nothing_says_nothing(world: World) -> None:
    class Nothing(set[str]):
        def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
            return self

    world.prefill._reqs_to_process = Nothing()
    world.begin("a")
    assert not held(world.table, "a")


# The patch's own errors


def test_a_prefill_that_stands_aside_says_so(world: World) -> None:
    world.begin("a")
    world.tables_can_be_read()
    handle = world.read("gone")
    world.context.stand_aside("somewhere", RuntimeError())
    assert ctypes.string_at(world.table.address, lease_table.BUCKET) == lease_table.ASIDE
    assert world.agent.check_xfer_state(handle) == "DONE"  # begun before, and its reader heard nothing
    assert world.agent.sent[-1][1] == b"gone:1"
    assert world.counters == {"prefill_aside": 1}
    side = world.handshake()
    after = world.decode._read_blocks(request_id="d-b", remote_request_id="b", side=side)
    assert after.notification == b"b:1"


def test_an_error_while_a_read_is_judged_passes_nothing_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.tables_can_be_read()
    handle = world.read("a")

    def raises(*_: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(world.context, "say", raises)
    assert world.agent.check_xfer_state(handle) == "ERR"
    assert world.context.aside
