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
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.lmcache_unfilled_stores import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext

TAG = "storage_manager"
Call = Callable[[], None]


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
        self._pending_shm_writes: dict[tuple[int, str], list[str]] = {}
        self.registered: dict[int, Any] = {7: None, 8: None}
        setattr(self, "_engine_driven_contexts" if module == patch.MODULE else "_non_gpu_contexts", self.registered)
        self.context = PatchContext("lmcache-unfilled-stores", {}, {}, lambda: None)
        self.targets = patch.wrappers(self.context)
        self.released: list[int] = []
        self.committed: list[str] = []

    def _make_transfer_key(self, key: str, instance_id: int) -> tuple[int, str]:
        return instance_id, key

    def _resolve_single_group_obj_keys(self, key: str) -> list[str]:
        return ["there already", key]

    def prepare(self, key: str, worker: int = 7, memory: Any = "memory") -> Any:
        entry = self.l1.reserve(key, memory)
        self._pending_shm_writes[worker, key] = [key]
        self.look(key, worker)
        return entry

    def look(self, key: str, worker: int, context: dict[str, Any] | None = None, within: Call = lambda: None) -> None:
        answer = SimpleNamespace(context={"slots": ["a slot"], "chunk_indices": [1]} if context is None else context)

        def prepare(*_: Any) -> Any:
            within()
            return answer

        assert self.targets[f"{self.module}.prepare_store"](prepare, self, (key, worker), {}) is answer

    def end(self, worker: int = 7) -> None:
        if self.module == patch.MODULE:
            self.registered.pop(worker, None)
            release = self.targets[f"{self.module}._release_entry"]
            release(lambda *args: self.released.append(args[0]), self, (worker, "entry"), {})
            return

        def unregister(instance_id: int) -> None:
            self.registered.pop(instance_id, None)
            self.released.append(instance_id)

        self.targets[f"{self.module}.unregister_kv_cache"](unregister, self, (), {"instance_id": worker})

    def commit(self, key: str, worker: int = 7, sent: bytes = b"", within: Call = lambda: None) -> Any:
        def commit(**_: Any) -> bool:
            within()
            self.committed.append(key)
            return True

        asked = {"key": key, "instance_id": worker, "cpu_data": sent}
        return self.targets[f"{self.module}.commit_store"](commit, self, (), asked)


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
    assert list(server._pending_shm_writes) == [(8, "b")]
    assert (server.released, server.context.counters) == ([7], {"kept_apart": 1})


def test_its_memory_comes_back_when_it_has_been_copied_to(server: Server) -> None:
    server.prepare("a")
    server.end()
    another = server.prepare("a", worker=8, memory="other memory")
    assert server.commit("a") is False
    assert (server.l1.freed, server.committed) == (["memory"], [])
    assert server.l1.at("a") is another
    assert server.commit("a") is True  # the second time it is LMCache's to answer
    assert (server.l1.freed, server.committed) == (["memory"], ["a"])
    assert server.commit("a", worker=8) is True
    assert server.context.counters == {"kept_apart": 1, "given_back": 1}


def test_of_two_stores_by_one_name_nobody_knows_which_has_copied(server: Server) -> None:
    made = Memory()
    memory = weakref.ref(made)
    server.prepare("a", memory=made)
    del made
    server.end()
    server.registered[7] = None  # registered again
    server.prepare("a", memory="other memory")
    assert server.commit("a") is True
    gc.collect()
    assert memory() is not None, "LMCache's objects give their memory back when nobody refers to them"
    assert server.l1.freed == []


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


def test_a_store_that_needs_no_room_says_nothing_of_an_earlier_one(server: Server) -> None:
    """All of it was there."""
    server.prepare("a")
    server.end()
    server.look("a", 7, {"slots": [], "chunk_indices": []})
    assert server.commit("a") is False
    assert server.l1.freed == ["memory"]


def test_a_goodbye_that_comes_while_room_is_made(server: Server) -> None:
    server.l1.reserve("a", "memory")
    server.registered.pop(7)
    server._pending_shm_writes[7, "a"] = ["a"]
    server.look("a", 7)
    assert (server.l1.at("a"), server.l1.freed, server._pending_shm_writes) == (None, [], {})


def test_a_registration_that_ends_waits_until_room_was_made(server: Server) -> None:
    """Else LMCache would end a store that was begun between the patch's look and its own."""
    ends = threading.Thread(target=server.end)

    def within() -> None:
        server._pending_shm_writes[7, "a"] = ["a"]
        ends.start()
        ends.join(0.1)
        assert server.released == []
        server.end(worker=8)  # another's does not wait
        assert server.released == [8]

    server.l1.reserve("a", "memory")
    server.look("a", 7, within=within)
    ends.join()
    assert (server.l1.at("a"), server.l1.freed, server._pending_shm_writes) == (None, [], {})


def test_a_registration_that_ends_while_a_store_does(server: Server) -> None:
    """The worker says only once that it has copied."""
    server.prepare("a")
    assert server.commit("a", within=server.end) is True
    assert server.l1.freed == ["memory"]
    assert server.context.counters == {"kept_apart": 1, "given_back": 1}


def test_a_worker_that_sends_what_it_stores_does_not_copy(server: Server) -> None:
    server.prepare("a")
    other, by_another = server.prepare("b"), server.prepare("c", worker=8)
    pending: list[Any] = []
    assert server.commit("a", sent=b"chunks", within=lambda: pending.extend(server._pending_shm_writes)) is True
    assert (server.l1.at("a"), server.l1.gone, server.l1.freed) == (None, ["a"], ["memory"])
    assert (server.l1.at("b"), server.l1.at("c")) == (other, by_another)
    assert (server.committed, pending) == (["a"], [(7, "b"), (8, "c")])
    assert server.context.counters == {"sent": 1}


def test_what_a_worker_sends_says_nothing_of_an_earlier_copy(server: Server) -> None:
    """It may be under way since before the worker registered again, and could not map the memory any more."""
    server.prepare("a")
    server.end()
    server.registered[7] = None
    server.look("a", 7, {"slots": [], "chunk_indices": []})
    assert server.commit("a", sent=b"chunks") is True
    assert server.l1.freed == []
    server.prepare("a", memory="other memory")
    assert server.commit("a", sent=b"chunks") is True
    assert server.l1.freed == ["other memory"]


def test_what_can_be_read_is_not_taken_for_reserved(server: Server) -> None:
    """As where it is filled before the patch has looked."""
    server.l1.reserve("a", "memory").write_lock.unlock()
    server.look("a", 7)
    server.end()
    assert server.l1.gone == []


def test_a_patch_that_stands_aside_gives_the_locks_back(server: Server) -> None:
    entry = server.prepare("a")
    own = entry.write_lock.own
    server.context.withdraw()
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
