"""LMCache's server gives nothing out that a worker reserved in shared memory and did not fill.

For a store over shared memory the server makes room, the worker copies into it, and says so. Where a worker's
registration ends in between, by its goodbye or because the server forgot it, LMCache ends its stores as if they had
been filled. Nobody knows then whether the worker copies still: its room leaves the index, and its memory is kept from
everybody until the worker says that it has copied. A worker that could not map the shared memory (in a container of its
own) is made room for too, and sends what it stores in a message: LMCache then keeps the room, and drops the message.

LMCache takes stores of one worker's number and one key for the same. Here the request is looked at as well, so that the
end of one is not another's; where that is one too, no COMMIT_STORE ends what may be another's.

Source: docs/connector-completions.md, "What LMCache's worker waits for"; nothing upstream.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]
Store = tuple[int, Any, str | None]
"""A worker's number, the key of what it stores, and the request. LMCache knows a store that was begun by the first two
alone; requests may store the same, and to 0.4.7 processes of two containers may have one number. No request: a store
that no COMMIT_STORE ends, since it may be another's.
"""

STORAGE = "lmcache.v1.distributed.storage_manager"
MODULE = "lmcache.v1.multiprocess.modules.engine_driven_transfer:EngineDrivenTransferModule"
MODULE_0_4_7 = "lmcache.v1.multiprocess.modules.non_gpu_transfer:NonGPUTransferModule"
"""The same under another name. Its workers' registrations end by their goodbye alone."""


class Held:
    """The write lock of one object for which room was made. The release's own ends after a time (600 s), in which the
    worker need not have filled it: to 0.5.5 the object can be read then, and later its memory is given to others.
    """

    def __init__(self, rooms: Rooms, store: Store, l1: Any, key: Any, entry: Any) -> None:
        self.rooms, self.store, self.l1, self.key, self.entry = rooms, store, l1, key, entry
        self.own = entry.write_lock
        entry.write_lock = self

    def is_locked(self) -> bool:
        """Where the patch has stood aside, as long as the release's own."""
        return not self.rooms.aside() or self.own.is_locked()

    def lock(self) -> None:
        """Nobody locks what is locked."""

    def unlock(self) -> None:
        """The worker has filled it, or LMCache drops it."""
        self.end()
        self.own.unlock()

    def end(self) -> None:
        self.entry.write_lock = self.own
        self.rooms.held.pop(self, None)


class Rooms:
    """What is reserved in one server's shared memory."""

    def __init__(self, aside: Callable[[], bool]) -> None:
        self.aside = aside  # whether the patch has stood aside
        self.turns: dict[int, threading.Lock] = {}  # by worker: a store begins or ends, or its registration does
        self.lock = threading.Lock()  # of what follows; `held` is changed by single calls, each under its L1's own lock
        self.held: dict[Held, None] = {}
        self.kept: dict[Store, list[tuple[Any, Any]]] = {}  # L1 and memory, of workers whose registration has ended
        self.refused: Counter[Store] = Counter()  # how often a name was asked for again, and got no room
        self.ambiguous: set[Store] = set()  # names by which several stores were begun, of which one may be copied to
        self.for_good: list[tuple[Any, Any]] = []  # of two stores by one name, whose ends cannot be told apart

    def asked_again(self, store: Store, given: bool) -> bool:
        """Room was asked for, and `given` or not; whether its COMMIT_STORE may be another's of the same name.

        Who is given none does not copy: it sends a message, or nothing.
        """
        same = [held for held in list(self.held) if held.store == store]
        with self.lock:
            if not same and store not in self.kept:
                return store in self.ambiguous
            if not given:
                self.refused[store] += 1
                return store in self.ambiguous
            self.for_good += self.kept.pop(store, [])
            self.ambiguous.add(store)
        for held in same:
            held.store = (*store[:2], None)
        return True

    def hold(self, storage: Any, store: Store, keys: list[Any]) -> None:
        """Room was made for these keys."""
        for l1 in l1s(storage):
            with l1._lock:
                for key in keys:
                    entry = reserved(l1, key)
                    if entry is not None and entry.write_lock.is_locked():
                        self.held[Held(self, store, l1, key, entry)] = None

    def keep(self, worker: int) -> int:
        """A worker's registration has ended: take what it has not filled out of the index; how many objects."""
        return sum(self._taken_out(held) for held in list(self.held) if held.store[0] == worker)

    def _is_there(self, held: Held) -> bool:
        with held.l1._lock:
            return self._is_held(held)

    def _is_held(self, held: Held) -> bool:
        """Not so where it was filled meanwhile, or dropped by an operator's command."""
        if reserved(held.l1, held.key) is held.entry and held.entry.write_lock is held:
            return True
        self.held.pop(held, None)
        return False

    def _taken_out(self, held: Held) -> bool:
        with held.l1._lock:
            if not self._is_held(held):
                return False
            with self.lock:
                self.kept.setdefault(held.store, []).append((held.l1, held.entry.memory_obj))
            take_out(held.l1, held.key)
            held.end()
            return True

    def of(self, store: Store) -> tuple[list[Any], list[Any]]:
        """The keys for which room was made: for this store, and for others that LMCache takes for the same."""
        same = [held for held in list(self.held) if held.store[:2] == store[:2] and self._is_there(held)]
        own = dict.fromkeys(held.key for held in same if held.store == store)
        return list(own), list(dict.fromkeys(held.key for held in same if held.store != store))

    def not_used(self, store: Store) -> int:
        """A worker does not copy into the room that was made for a store: it is free. How many objects."""
        with self.lock:
            if self.refused[store]:  # the message may be that one's
                self.refused -= Counter([store])
                return 0
        for held in [held for held in list(self.held) if held.store == store]:
            self._taken_out(held)
        return self.copied(store)

    def copied(self, store: Store) -> int:
        """The worker has copied after all: its room is free. How many objects."""
        with self.lock:
            kept = self.kept.pop(store, [])
        for l1, memory in kept:
            with l1._lock:
                l1._memory_manager.free([memory])
        return len(kept)


def l1s(storage: Any) -> list[Any]:
    """A storage manager's L1 caches: several from 0.5.6 on."""
    several = getattr(storage, "_l1_managers_by_id", None)
    return [storage._l1_manager] if several is None else list(several.values())


def reserved(l1: Any, key: Any) -> Any:
    """What room was made for, or None; from 0.5.6 on it is apart from what can be read."""
    if hasattr(l1, "_staging"):
        return l1._staging.get(key, {}).get(sys.modules[STORAGE]._L1_WRITE_TAG)
    return l1._objects.get(key)


def take_out(l1: Any, key: Any) -> None:
    """Out of the index, without giving its memory back."""
    if hasattr(l1, "_staging"):
        l1._pop_staging(key, sys.modules[STORAGE]._L1_WRITE_TAG)
        gone = key not in l1._objects and key not in l1._staging
    else:
        del l1._objects[key]
        gone = True
    for listener in l1._registered_listeners if gone else ():
        listener.on_l1_keys_deleted_by_manager([key])


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """At each target: a look at its calls, or a wrapper in wrapt's form (wrapped, instance, args, kwargs)."""
    # A patch that stands aside leaves the locks, as the release's own: COMMIT_STORE ends each, without the patch too.
    rooms = Rooms(lambda: livepatch.aside)

    def prepare_store(wrapped: Call, module: Any, args: Any, kwargs: Any) -> Any:
        """Let no time end what is reserved."""
        asked = named(args, kwargs)
        store = store_of(module, **asked)
        with turn(store[0]):
            answer = wrapped(*args, **kwargs)
            given = bool(answer.context.get("slots"))  # else all is there, or goes through messages
            ambiguous = rooms.asked_again(store, given)
            if given:
                hold(module, answer, (*store[:2], None) if ambiguous else store)
        return answer

    def turn(worker: int) -> threading.Lock:
        return rooms.turns.setdefault(worker, threading.Lock())

    def hold(module: Any, answer: Any, store: Store) -> None:
        worker, key, _ = store
        keys = module._resolve_single_group_obj_keys(key)
        rooms.hold(module._ctx.storage_manager, store, [keys[index] for index in answer.context["chunk_indices"]])
        if worker not in registered(module):  # its goodbye came meanwhile, and found nothing
            ended(module, worker)

    def ended(module: Any, worker: int) -> None:
        with module._pending_shm_lock:
            for name in [name for name in module._pending_shm_writes if name[0] == worker]:
                del module._pending_shm_writes[name]
        kept = rooms.keep(worker)
        if kept:
            livepatch.count("kept_apart", kept)
            livepatch.say("kept_apart", f"a worker went in a store: {kept} chunks that it did not fill are kept apart")

    def release_entry(wrapped: Call, module: Any, args: Any, kwargs: Any) -> Any:
        """A registration has ended. LMCache ends the loads that it began, and finds no stores to be ended."""
        worker = args[0] if args else kwargs["instance_id"]
        with turn(worker):
            ended(module, worker)
            return wrapped(*args, **kwargs)

    def commit_store(wrapped: Call, module: Any, args: Any, kwargs: Any) -> Any:
        """The worker has copied, or sends what it stores in a message."""
        asked = named(args, kwargs)
        in_message = asked.pop("cpu_data")
        store = store_of(module, **asked)
        if in_message:
            with turn(store[0]):
                sent(module, store)
            return wrapped(*args, **kwargs)
        with turn(store[0]):  # else its registration could end, and another store begin, before LMCache ends this one
            number = rooms.copied(store)
            if number:
                livepatch.count("given_back", number)
                return False  # too late to be given out
            own, others = rooms.of(store)
            pending_of(module, store, own)
            try:
                return wrapped(*args, **kwargs)
            except Exception:
                rooms.not_used(store)  # the worker has copied, and nobody is given what it stored
                raise
            finally:
                pending_of(module, store, others)

    def pending_of(module: Any, store: Store, keys: list[Any]) -> None:
        """What LMCache finds reserved under a store's name."""
        with module._pending_shm_lock:
            module._pending_shm_writes.pop(store[:2], None)
            if keys:
                module._pending_shm_writes[store[:2]] = keys

    def sent(module: Any, store: Store) -> None:
        """LMCache would leave the message out: there is room for its chunks already, of which nobody fills any."""
        number = rooms.not_used(store)
        pending_of(module, store, rooms.of(store)[1])
        if number:
            livepatch.count("sent", number)
            why = "a worker cannot map this server's shared memory (another container's /dev/shm?)"
            livepatch.say("sent", f"{why}: what it stores comes in messages, and what it loads fails")

    return {
        f"{MODULE}._release_entry": release_entry,
        f"{MODULE_0_4_7}.unregister_kv_cache": release_entry,
        **{f"{module}.commit_store": commit_store for module in (MODULE, MODULE_0_4_7)},
        **{f"{module}.prepare_store": prepare_store for module in (MODULE, MODULE_0_4_7)},
    }


def registered(module: Any) -> Any:
    """The workers that are registered, by number."""
    return module._non_gpu_contexts if hasattr(module, "_non_gpu_contexts") else module._engine_driven_contexts


def store_of(module: Any, key: Any, instance_id: int) -> Store:
    return (*module._make_transfer_key(key, instance_id), key.request_id)


def named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a store is asked for with, in LMCache's order: a key, a worker's number, and at its end what is sent."""
    return {**dict(zip(("key", "instance_id", "cpu_data"), args, strict=False)), **kwargs}
