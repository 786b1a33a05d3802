"""`lmcache-unfilled-stores`: who may have which memory, call by call. Contents are in tests/releases.

The server's parts are stand-ins, of both kinds: to 0.5.5 one index has all objects, from 0.5.6 on what is being written
is apart.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.lmcache_unfilled_stores import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext

TAG = "storage_manager"
Call = Callable[[], None]


@dataclass(frozen=True)
class Key:
    """What is stored; as LMCache's, alike whoever asks."""

    name: str
    request_id: str = field(default="one", compare=False)


class Lock:
    """The release's own write lock, whose time may be over."""

    def __init__(self) -> None:
        self.locked = True

    def is_locked(self) -> bool:
        return self.locked

    def unlock(self) -> None:
        self.locked = False


class Memory:
    """An object whose memory comes back when nobody refers to it."""


class Index:
    """An L1 cache to 0.5.5."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, Any] = {}
        self.freed: list[Any] = []
        self.gone: list[str] = []
        self._memory_manager = SimpleNamespace(free=self.freed.extend)
        self._registered_listeners = [SimpleNamespace(on_l1_keys_deleted_by_manager=self.gone.extend)]

    def reserve(self, key: str, memory: Any) -> Any:
        entry = SimpleNamespace(memory_obj=memory, write_lock=Lock())
        self._objects[key] = entry
        return entry

    def at(self, key: str) -> Any:
        """What is being written."""
        return self._objects.get(key)

    def drop(self, key: str) -> None:
        del self._objects[key]


class Apart(Index):
    """From 0.5.6 on."""

    def __init__(self) -> None:
        super().__init__()
        self._staging: dict[str, dict[str, Any]] = {}

    def reserve(self, key: str, memory: Any) -> Any:
        entry = SimpleNamespace(memory_obj=memory, write_lock=Lock())
        self._staging.setdefault(key, {})[TAG] = entry
        return entry

    def at(self, key: str) -> Any:
        return self._staging.get(key, {}).get(TAG)

    def _pop_staging(self, key: str, tag: str) -> None:
        del self._staging[key][tag]
        if not self._staging[key]:
            del self._staging[key]

    def drop(self, key: str) -> None:
        self._pop_staging(key, TAG)


class Server:
    """The part that patched calls are made of. A store by `key` needs one object, of the same name."""

    def __init__(self, l1: Index, module: str) -> None:
        self.l1, self.module = l1, module
        storage = {"_l1_managers_by_id": {1: Index(), 2: l1}} if isinstance(l1, Apart) else {"_l1_manager": l1}
        self._ctx = SimpleNamespace(storage_manager=SimpleNamespace(**storage))
        self._pending_shm_lock = threading.Lock()
        self._pending_shm_writes: dict[tuple[int, Key], list[str]] = {}
        self.registered: dict[int, Any] = {7: None, 8: None}
        setattr(self, "_engine_driven_contexts" if module == patch.MODULE else "_non_gpu_contexts", self.registered)
        self.context = PatchContext("lmcache-unfilled-stores", {}, {}, lambda: None)
        self.targets = patch.wrappers(self.context)
        self.released: list[int] = []
        self.committed: list[
            tuple[str, list[str] | None]
        ] = []  # what was stored, and what LMCache found reserved for it

    def _make_transfer_key(self, key: Key, instance_id: int) -> tuple[int, Key]:
        return instance_id, key

    def _resolve_single_group_obj_keys(self, key: Key) -> list[str]:
        return ["there already", key.name]

    def prepare(self, name: str, worker: int = 7, memory: Any = "memory", request: str = "one", chunk: int = 1) -> Any:
        """Room is made for one of its two chunks."""
        key = Key(name, request)
        wanted = self._resolve_single_group_obj_keys(key)[chunk]
        entry = self.l1.reserve(wanted, memory)
        self._pending_shm_writes[worker, key] = [wanted]
        self.look(name, worker, {"slots": ["a slot"], "chunk_indices": [chunk]}, request=request)
        return entry

    def look(
        self,
        name: str,
        worker: int,
        context: dict[str, Any] | None = None,
        within: Call = lambda: None,
        request: str = "one",
    ) -> None:
        answer = SimpleNamespace(context={"slots": ["a slot"], "chunk_indices": [1]} if context is None else context)
        key = Key(name, request)

        def prepare(*_: Any) -> Any:
            within()
            return answer

        assert self.targets[f"{self.module}.prepare_store"](prepare, self, key, worker) is answer

    def end(self, worker: int = 7, within: Call = lambda: None) -> None:
        def released(instance_id: int, entry: str = "") -> None:
            self.registered.pop(instance_id, None)
            within()
            self.released.append(instance_id)

        if self.module == patch.MODULE:
            self.registered.pop(worker, None)
            self.targets[f"{self.module}._release_entry"](released, self, worker, "entry")
            return

        self.targets[f"{self.module}.unregister_kv_cache"](released, self, instance_id=worker)

    def commit(
        self, name: str, worker: int = 7, sent: bytes = b"", within: Call = lambda: None, request: str = "one"
    ) -> Any:
        def commit(*_: Any) -> bool:
            within()
            found = None if sent else self._pending_shm_writes.pop((worker, Key(name)), None)
            self.committed.append((name, found))
            for key in found or ():
                self.l1.at(key).write_lock.unlock()
            return True

        asked = {"key": Key(name, request), "instance_id": worker, "cpu_data": sent}
        return self.targets[f"{self.module}.commit_store"](commit, self, **asked)


@pytest.fixture(
    params=[(Index, patch.MODULE_0_4_7), (Index, patch.MODULE), (Apart, patch.MODULE)], ids=["0.4.7", "0.5.0", "0.5.6"]
)
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setitem(sys.modules, patch.STORAGE, SimpleNamespace(_L1_WRITE_TAG=TAG))
    index, module = request.param
    return Server(index(), module)


def test_no_time_ends_what_is_reserved(server: Server) -> None:
    entry = server.prepare("a")
    own = entry.write_lock.own
    own.locked = False  # its time is over
    entry.write_lock.lock()
    assert entry.write_lock.is_locked()
    entry.write_lock.unlock()  # the worker has filled it
    assert entry.write_lock is own
    filled_in_time = server.prepare("b")
    own = filled_in_time.write_lock.own
    filled_in_time.write_lock.unlock()
    assert (filled_in_time.write_lock, own.locked) == (own, False)
    held = weakref.ref(server.prepare("c").write_lock)
    server.l1.at("c").write_lock.unlock()
    gc.collect()
    assert held() is None, "nothing is remembered of what was filled"
    server.end()
    assert (server.l1.gone, server.l1.freed, server.context.counters) == ([], [], {})


def test_what_is_not_filled_leaves_the_index_and_its_memory_is_nobodys(server: Server) -> None:
    entry = server.prepare("a")
    server.prepare("b", worker=8)
    own = entry.write_lock.own
    server.end()
    assert (server.l1.at("a"), server.l1.gone, server.l1.freed) == (None, ["a"], [])
    assert entry.write_lock is own
    assert server.l1.at("b").write_lock.is_locked()
    assert list(server._pending_shm_writes) == [(8, Key("b"))]
    assert (server.released, server.context.counters) == ([7], {"kept_apart": 1})


def test_its_memory_comes_back_when_it_has_been_copied_to(server: Server) -> None:
    server.prepare("a")
    server.end()
    another = server.prepare("a", worker=8, memory="other memory")
    assert server.commit("a") is False
    assert (server.l1.freed, server.committed) == (["memory"], [])
    assert server.l1.at("a") is another
    assert server.commit("a") is True  # the second time it is LMCache's to answer
    assert (server.l1.freed, server.committed) == (["memory"], [("a", None)])
    assert another.write_lock.is_locked()
    assert server.commit("a", worker=8) is True
    assert (server.committed[-1], another.write_lock.is_locked()) == (("a", ["a"]), False)
    assert server.context.counters == {"kept_apart": 1, "given_back": 1}


def test_of_two_stores_by_one_name_nobody_knows_which_has_copied(server: Server) -> None:
    """The first may be copied to still, and its COMMIT_STORE would end the second."""
    made = Memory()
    memory = weakref.ref(made)
    server.prepare("a", memory=made)
    del made
    server.end()
    server.registered[7] = None  # registered again
    second = server.prepare("a", memory="other memory")
    assert server.commit("a") is True
    gc.collect()
    assert memory() is not None, "LMCache's objects give their memory back when nobody refers to them"
    assert server.l1.freed == []
    assert (second.write_lock.is_locked(), server.committed) == (True, [("a", None)])


@pytest.mark.parametrize("sends", [1, 2], ids=["once", "twice"])
def test_what_another_sends_by_the_same_name_says_nothing_of_a_copy_under_way(server: Server, sends: int) -> None:
    """To 0.4.7 two engines may have one number, and one request: one copies, the other is given no room, and sends."""
    copies = server.prepare("a")
    for _ in range(sends):
        server.look("a", 7, {"slots": [], "chunk_indices": []})
    for _ in range(sends):
        assert server.commit("a", sent=b"chunks") is True
        assert (server.l1.freed, server.l1.at("a"), copies.write_lock.is_locked()) == ([], copies, True)
    assert server.commit("a") is True
    assert (copies.write_lock.is_locked(), server.committed[-1]) == (False, ("a", ["a"])), "its own end is its own"
    assert server.context.counters == {}


def test_what_another_reserves_under_the_same_key_stays(server: Server) -> None:
    held = weakref.ref(server.prepare("a").write_lock)
    server.l1.drop("a")  # an operator's command, which frees it
    another = server.prepare("a", worker=8)
    server.end()
    assert server.l1.at("a") is another
    assert (server.l1.gone, server.context.counters) == ([], {})
    gc.collect()
    assert held() is None


def test_what_another_has_reserved_of_the_same_prompt_is_that_ones(server: Server) -> None:
    """It needs no room, so none is made for it."""
    another = server.prepare("there already", worker=8)
    server.prepare("a")
    server.end()
    assert (server.l1.at("there already"), server.l1.gone) == (another, ["a"])


class FilledFirst:
    """A lock for which somebody waits until the worker has filled what it reserved."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry

    def __enter__(self) -> None:
        self.entry.write_lock.unlock()

    def __exit__(self, *_: object) -> None: ...


def test_what_is_filled_just_then_stays(server: Server) -> None:
    entry = server.prepare("a")
    server.l1._lock = FilledFirst(entry)  # type: ignore[assignment]
    server.end()
    assert (server.l1.at("a"), server.l1.gone, server.context.counters) == (entry, [], {})


def test_a_store_of_another_request_that_needs_no_room_says_nothing_of_an_earlier_one(server: Server) -> None:
    """All of it was there."""
    server.prepare("a")
    server.end()
    server.look("a", 7, {"slots": [], "chunk_indices": []}, request="two")
    assert server.commit("a") is False
    assert server.l1.freed == ["memory"]


def test_a_goodbye_that_comes_while_room_is_made(server: Server) -> None:
    server.l1.reserve("a", "memory")
    server.registered.pop(7)
    server._pending_shm_writes[7, Key("a")] = ["a"]
    server.look("a", 7)
    assert (server.l1.at("a"), server.l1.freed, server._pending_shm_writes) == (None, [], {})


def test_a_registration_that_ends_waits_until_room_was_made(server: Server) -> None:
    """Else LMCache would end a store that was begun between the patch's look and its own."""
    ends = threading.Thread(target=server.end)

    def within() -> None:
        server._pending_shm_writes[7, Key("a")] = ["a"]
        ends.start()
        ends.join(0.1)
        assert server.released == []
        server.end(worker=8)  # another's does not wait
        assert server.released == [8]

    server.l1.reserve("a", "memory")
    server.look("a", 7, within=within)
    ends.join()
    assert (server.l1.at("a"), server.l1.freed, server._pending_shm_writes) == (None, [], {})


def test_a_registration_that_ends_waits_until_a_store_has_ended(server: Server) -> None:
    """Else another's store could begin under the key before LMCache ends this one, and be ended by it, unfilled."""
    ends = threading.Thread(target=server.end)

    def within() -> None:
        ends.start()
        ends.join(0.1)
        assert server.released == []
        server.end(worker=8)  # another's does not wait
        assert server.released == [8]

    entry = server.prepare("a")
    assert server.commit("a", within=within) is True
    ends.join()
    assert (server.l1.at("a"), server.l1.gone, entry.write_lock.is_locked()) == (entry, [], False)
    assert (server.released, server.context.counters) == ([8, 7], {})


def test_what_a_worker_sends_waits_until_its_registration_has_ended(server: Server) -> None:
    """Another worker's does not."""
    server.prepare("a", memory="of 7")
    server.prepare("b", memory="of 8", worker=8)
    sends = threading.Thread(target=lambda: server.commit("a", sent=b"chunks"))

    def within() -> None:
        sends.start()
        sends.join(0.1)
        assert server.l1.freed == []
        server.commit("b", worker=8, sent=b"chunks")
        assert server.l1.freed == ["of 8"]

    server.end(within=within)
    sends.join()
    assert server.l1.freed == ["of 8", "of 7"]


def test_requests_that_store_the_same_end_what_was_reserved_for_each(server: Server) -> None:
    """LMCache keeps what was reserved last. To 0.4.7 the requests may be of two engines."""
    first = server.prepare("a")
    second = server.prepare("a", chunk=0, request="two")
    assert server.commit("a") is True
    assert (server.committed, server._pending_shm_writes) == ([("a", ["a"])], {(7, Key("a")): ["there already"]})
    assert (first.write_lock.is_locked(), second.write_lock.is_locked()) == (False, True)
    assert server.commit("a", request="three") is True
    assert server.committed[1:] == [("a", None)], "nothing was reserved for this one"
    assert server.commit("a", request="two") is True
    assert (server.committed[2:], server._pending_shm_writes) == ([("a", ["there already"])], {})
    assert not second.write_lock.is_locked()
    assert server.context.counters == {}


def test_what_is_reserved_for_others_stays_where_a_store_raises(server: Server) -> None:
    server.prepare("a")
    server.prepare("a", chunk=0, request="two")

    def within() -> None:
        raise ValueError("not registered")

    with pytest.raises(ValueError, match="not registered"):
        server.commit("a", within=within)
    assert server._pending_shm_writes == {(7, Key("a")): ["there already"]}
    assert (server.l1.freed, server.l1.at("a")) == (["memory"], None), "the worker has copied, and nobody else does"


def test_neither_of_two_stores_of_one_request_under_way_is_ended_by_either(server: Server) -> None:
    """From 0.5.2 on a worker stores in several threads: the end of the first comes when the second has begun."""
    first = server.prepare("a")
    second = server.prepare("a", chunk=0)
    assert server.commit("a") is True
    assert (first.write_lock.is_locked(), second.write_lock.is_locked()) == (True, True)
    assert (server.committed, server.l1.freed) == ([("a", None)], [])
    assert server.commit("a") is False, "both have copied: nobody is given what they stored, and their room is free"
    assert (server.l1.at("a"), server.l1.at("there already"), server.l1.freed) == (None, None, ["memory"] * 2)
    assert (server._pending_shm_writes, server.context.counters) == ({}, {"given_back": 2})


def test_of_two_stores_of_one_request_the_one_under_way_keeps_its_room_after_a_goodbye(server: Server) -> None:
    """The first has copied, or the second has: nobody knows, until both have said so."""
    server.prepare("a", memory="first")
    server.prepare("a", memory="second", chunk=0)
    assert server.commit("a") is True
    server.end()
    assert (server.l1.at("a"), server.l1.at("there already"), server.l1.freed) == (None, None, [])
    assert server.commit("a") is False
    assert (server.l1.freed, server.context.counters) == (["first", "second"], {"kept_apart": 2, "given_back": 2})


def test_what_one_sends_says_nothing_of_what_is_reserved_for_another(server: Server) -> None:
    """To 0.4.7 they may be of two engines, of which one shares memory with the server."""
    copies = server.prepare("a")
    server.look("a", 7, {"slots": [], "chunk_indices": []}, request="two")
    assert server.commit("a", request="two", sent=b"chunks") is True
    assert (server.l1.at("a"), copies.write_lock.is_locked(), server.l1.freed) == (copies, True, [])
    assert server._pending_shm_writes == {(7, Key("a")): ["a"]}
    assert server.commit("a") is True
    assert server.committed == [("a", None), ("a", ["a"])]
    assert server.context.counters == {}


def test_a_late_end_of_one_store_says_nothing_of_anothers(server: Server) -> None:
    """Nor gives it the memory back into which the other copies."""
    server.prepare("a")
    server.prepare("a", memory="second", chunk=0, request="two")
    server.end()
    server.registered[7] = None
    third = server.prepare("a", memory="third", request="three")
    assert server.commit("a") is False
    assert (server.l1.freed, third.write_lock.is_locked()) == (["memory"], True)
    assert server._pending_shm_writes == {(7, Key("a")): ["a"]}
    assert server.commit("a", request="two") is False
    assert (server.l1.freed, third.write_lock.is_locked()) == (["memory", "second"], True)
    assert server.commit("a", request="three") is True
    assert (third.write_lock.is_locked(), server.committed) == (False, [("a", ["a"])])


def test_a_store_whose_room_an_operator_has_dropped_ends_no_others(server: Server) -> None:
    server.prepare("a")
    server.l1.drop("a")
    another = server.prepare("a", worker=8)
    assert server.commit("a") is True
    assert (server.committed, another.write_lock.is_locked()) == ([("a", None)], True)


def test_the_room_of_a_worker_that_sends_comes_back_also_where_its_registration_has_ended(server: Server) -> None:
    server.prepare("a")
    server.end()
    assert server.commit("a", sent=b"chunks") is True
    assert server.l1.freed == ["memory"]
    assert server.context.counters == {"kept_apart": 1, "sent": 1}


def test_a_worker_that_sends_what_it_stores_does_not_copy(server: Server) -> None:
    server.prepare("a")
    other, by_another = server.prepare("b"), server.prepare("c", worker=8)
    pending: list[Any] = []
    assert server.commit("a", sent=b"chunks", within=lambda: pending.extend(server._pending_shm_writes)) is True
    assert (server.l1.at("a"), server.l1.gone, server.l1.freed) == (None, ["a"], ["memory"])
    assert (server.l1.at("b"), server.l1.at("c")) == (other, by_another)
    assert (server.committed, pending) == ([("a", None)], [(7, Key("b")), (8, Key("c"))])
    assert server.context.counters == {"sent": 1}


def test_the_room_that_one_of_two_senders_was_given_comes_back_with_the_last_message(server: Server) -> None:
    """They have one number and one request: which of them was given none is not known before both have sent."""
    server.prepare("a")
    server.look("a", 7, {"slots": [], "chunk_indices": []})
    freed = []
    for _ in range(2):
        assert server.commit("a", sent=b"chunks") is True
        freed.append(list(server.l1.freed))
    assert freed == [[], ["memory"]]
    assert server.context.counters == {"sent": 1}


def test_what_a_worker_sends_says_nothing_of_an_earlier_copy(server: Server) -> None:
    """It may be under way since before the worker registered again, and could not map the memory any more."""
    server.prepare("a")
    server.end()
    server.registered[7] = None
    server.look("a", 7, {"slots": [], "chunk_indices": []})
    assert server.commit("a", sent=b"chunks") is True
    assert server.l1.freed == []
    another = server.prepare("a", memory="other memory")  # by the name of what may be copied to still
    assert server.commit("a", sent=b"chunks") is True
    assert (server.l1.freed, another.write_lock.is_locked()) == ([], True)


def test_a_name_that_several_stores_have_is_not_taken_for_the_last_ones(server: Server) -> None:
    """Each of them may be copied to until all have ended: after two goodbyes, too."""
    for memory in ("first", "second"):
        server.prepare("a", memory=memory)
        server.end()
        server.registered[7] = None
    third = server.prepare("a", memory="third")
    for _ in range(2):
        assert server.commit("a") is True
        assert (third.write_lock.is_locked(), server.l1.at("a"), server.l1.freed) == (True, third, [])
    assert server.commit("a") is False
    assert (server.l1.at("a"), server.l1.freed) == (None, ["first", "second", "third"])


@pytest.mark.parametrize("refused", [False, True], ids=["needs no room", "is refused"])
def test_a_store_that_is_asked_for_again_and_gets_no_room_is_ended_by_its_own_commit(
    server: Server, refused: bool
) -> None:
    """The registration ended within a copy, and the same request asks again: the first copy's end is still to come."""
    server.prepare("a")
    server.end()
    if refused:

        def within() -> None:
            raise ValueError("not registered")

        with pytest.raises(ValueError, match="not registered"):
            server.look("a", 7, within=within)
    else:
        server.look("a", 7, {"slots": [], "chunk_indices": []})
    assert server.commit("a") is False
    assert (server.l1.freed, server.committed) == (["memory"], [])


def test_what_can_be_read_is_not_taken_for_reserved(server: Server) -> None:
    """As where it is filled before the patch has looked."""
    server.l1.reserve("a", "memory").write_lock.unlock()
    server.look("a", 7)
    server.end()
    assert server.l1.gone == []


def test_what_was_reserved_before_a_patch_stood_aside_is_so_as_long_as_on_stock(server: Server) -> None:
    """From 0.5.6 on a goodbye gives out what is locked, and not what was not filled in time."""
    entry = server.prepare("a")
    own = entry.write_lock.own
    server.context.withdraw()
    assert entry.write_lock.is_locked()
    own.locked = False  # its time is over
    assert not entry.write_lock.is_locked()
    entry.write_lock.unlock()
    assert entry.write_lock is own


def test_where_stores_go_through_messages_there_is_nothing_to_hold(server: Server) -> None:
    through_messages: dict[str, Any] = {}
    nothing_to_copy: dict[str, Any] = {"slots": [], "chunk_indices": []}
    for context in (through_messages, nothing_to_copy):
        server.look("a", 7, context)
    server.end()
    assert server.context.counters == {}


@pytest.mark.parametrize("written", [False, True])
def test_a_key_that_can_be_read_or_is_written_by_others_is_not_gone(
    monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    monkeypatch.setitem(sys.modules, patch.STORAGE, SimpleNamespace(_L1_WRITE_TAG=TAG))
    l1 = Apart()
    server = Server(l1, patch.MODULE)
    server.prepare("a")
    if written:
        l1._staging["a"]["another tag"] = SimpleNamespace()
    else:
        l1._objects["a"] = SimpleNamespace()
    server.end()
    assert (server.l1.at("a"), server.l1.gone) == (None, [])


# What is remembered, and for how long


NOTHING: dict[str, Any] = {"slots": [], "chunk_indices": []}
"""The answer to who is given no room."""


def ends_well(server: Server, number: int) -> None:
    server.prepare(f"{number}")
    server.commit(f"{number}")


def is_preempted(server: Server, number: int) -> None:
    """And resumed before a thread of its worker could say that its first store has ended."""
    server.prepare(f"{number}")
    server.prepare(f"{number}", chunk=0)
    for _ in range(2):
        server.commit(f"{number}")


def is_refused(server: Server, number: int) -> None:
    """A worker that has the memory mapped sends no message."""
    server.prepare(f"{number}")
    server.look(f"{number}", 7, NOTHING)
    server.commit(f"{number}")


def sends(server: Server, number: int) -> None:
    server.prepare(f"{number}")
    server.look(f"{number}", 7, NOTHING)
    for _ in range(2):
        server.commit(f"{number}", sent=b"chunks")


def is_forgotten(server: Server, number: int) -> None:
    """It is registered again, stores once more, and both stores end."""
    server.prepare(f"{number}")
    server.end()
    server.registered[7] = None
    server.prepare(f"{number}")
    for _ in range(2):
        server.commit(f"{number}")


def comes_and_goes(server: Server, number: int) -> None:
    """A worker of its own, with a store and one that is given no room."""
    worker = 100 + number
    server.registered[worker] = None
    server.prepare(f"{number}", worker=worker)
    if server.module == patch.MODULE:  # to 0.4.7 its message may come yet, of another process
        server.look(f"{number}", worker, NOTHING)
    server.commit(f"{number}", worker=worker)
    server.end(worker=worker)


def remembered() -> int:
    """Objects of the patch's classes, and what is in their containers."""
    gc.collect()
    ours = [one for one in gc.get_objects() if type(one).__module__ == patch.__name__]
    return len(ours) + sum(len(kept) for one in ours for kept in vars(one).values() if hasattr(kept, "__len__"))


@pytest.mark.parametrize("life", [ends_well, is_preempted, is_refused, sends, is_forgotten, comes_and_goes])
def test_nothing_is_remembered_of_stores_that_have_ended(life: Callable[[Server, int], None], server: Server) -> None:
    life(server, 0)
    before = remembered()
    for number in range(1, 200):
        life(server, number)
    assert (remembered(), server._pending_shm_writes) == (before, {})


def instructions(act: Callable[[], Any]) -> int:
    """How many of Python's instructions of the patch's file an act takes."""
    taken = 0

    def called(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != patch.__file__:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return instruction

    def instruction(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal taken
        taken += event == "opcode"
        return instruction

    before = sys.gettrace()
    sys.settrace(called)
    try:
        act()
    finally:
        sys.settrace(before)
    return taken


def test_a_store_costs_the_same_whatever_else_is_reserved(server: Server) -> None:
    costs = []
    for stores in (range(10), range(10, 1000)):
        for number in stores:
            server.prepare(f"{number}")
        costs.append(instructions(lambda: (server.prepare("one"), server.commit("one"))))
        costs.append(instructions(lambda: (server.prepare("two"), server.commit("two", sent=b"chunks"))))
    assert min(costs) > 50
    assert costs[:2] == costs[2:]


def test_a_long_prompts_key_is_hashed_by_lmcache_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all of the prompt's token ids: with a million, each hash takes the server ten milliseconds."""
    hashed: list[str] = []

    def counted(key: Key) -> int:
        hashed.append(key.name)
        return 1

    for name, value in {"token_ids": (1, 2, 3), "start": 0, "end": 3, "__hash__": counted}.items():
        monkeypatch.setattr(Key, name, value, raising=False)
    server.prepare("a")
    assert server.commit("a") is True
    assert hashed == ["a", "a"], "where it notes the store, and where it ends it"
    server.prepare("a")
    server.prepare("b")  # as long, of the same place in its prompt: another key
    assert server.commit("b") is True
    assert (server.committed[-1], server.l1.at("a").write_lock.is_locked()) == (("b", ["b"]), True)


def test_a_message_that_comes_late_says_nothing_of_a_later_store(server: Server) -> None:
    """Who sends it was given no room while another copied, whose copy has ended meanwhile; a third copies now."""
    server.prepare("a")
    server.look("a", 7, NOTHING)
    assert server.commit("a") is True
    third = server.prepare("a", memory="third")
    assert server.commit("a", sent=b"chunks") is True
    assert (server.l1.freed, server.l1.at("a"), third.write_lock.is_locked()) == ([], third, True)
    assert server.commit("a") is True
    assert (third.write_lock.is_locked(), server.committed[-1]) == (False, ("a", ["a"]))
    server.prepare("b", memory="is sent")
    assert server.commit("b", sent=b"chunks") is True
    assert server.l1.freed == ["is sent"], "no other message is to come"


def test_a_message_that_was_not_heard_ends_with_the_registration_where_that_is_its_senders(server: Server) -> None:
    """To 0.4.7 another process may have the number, and send it when a third is registered by that."""
    server.prepare("a")
    server.look("a", 7, NOTHING)
    server.commit("a")
    server.end()
    server.registered[7] = None
    server.prepare("a", memory="is given room")
    server.commit("a", sent=b"chunks")
    assert server.l1.freed == ([] if server.module == patch.MODULE_0_4_7 else ["is given room"])


def test_who_waits_for_a_workers_turn_finds_what_was_reserved_meanwhile(server: Server) -> None:
    """What is known of a worker goes when nothing is under way, and comes anew."""
    begins = threading.Thread(target=lambda: server.prepare("b", memory="of b"))

    def within() -> None:
        begins.start()
        begins.join(0.1)

    server.prepare("a")
    server.commit("a", within=within)
    begins.join()
    server.end()
    assert (server.l1.at("b"), server.l1.gone, server.context.counters) == (None, ["b"], {"kept_apart": 1})
