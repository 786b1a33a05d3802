"""LMCache's server gives nothing out that a worker reserved in shared memory and did not fill.

For a store over shared memory the server makes room, the worker copies into it, and says so. Where a worker's
registration ends in between, by its goodbye or because the server forgot it, LMCache ends its stores as if they had
been filled. Nobody knows then whether the worker copies still: its room leaves the index, and its memory is kept from
everybody until the worker says that it has copied. A worker that could not map the shared memory (in a container of its
own) is made room for too, and sends what it stores in a message: LMCache then keeps the room, and drops the message.

LMCache takes stores of one worker's number and one key for the same. Here the request is looked at as well, so that the
end of one is not another's. Where several stores have one request too, their room is free, unread, when all have ended.

Source: docs/connector-completions.md, "What LMCache's worker waits for"; nothing upstream.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]
Store = tuple[int, "Name", str]
"""A worker's number, the key of what it stores, and the request. LMCache knows a store that was begun by the first two
alone; requests may store the same, and to 0.4.7 processes of two containers may have one number.
"""

STORAGE = "lmcache.v1.distributed.storage_manager"
MODULE = "lmcache.v1.multiprocess.modules.engine_driven_transfer:EngineDrivenTransferModule"
MODULE_0_4_7 = "lmcache.v1.multiprocess.modules.non_gpu_transfer:NonGPUTransferModule"
"""The same under another name. Its workers' registrations end by their goodbye alone."""


class Name:
    """The key of what is stored, as LMCache compares it. It has all of a prompt's token ids: to hash a million takes
    ten milliseconds, and as long to see that two are the same. That is seen once: they have one key from then on.
    """

    __slots__ = ("hash", "key")

    def __init__(self, key: Any) -> None:
        self.key = key
        ids = getattr(key, "token_ids", None)
        self.hash = hash(key) if ids is None else hash((len(ids), key.start, key.end))

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Name) or self.hash != other.hash:
            return False
        if self.key is not other.key and self.key != other.key:
            return False
        self.key = other.key
        return True


class Held:
    """The write lock of one object for which room was made. The release's own ends after a time (600 s), in which the
    worker need not have filled it: to 0.5.5 the object can be read then, and later its memory is given to others.
    """

    def __init__(self, aside: Callable[[], bool], stores: Stores, l1: Any, key: Any, entry: Any) -> None:
        self.aside, self.stores, self.l1, self.key, self.entry = aside, stores, l1, key, entry
        self.own = entry.write_lock
        entry.write_lock = self

    def is_locked(self) -> bool:
        """Where the patch has stood aside, as long as the release's own."""
        return not self.aside() or self.own.is_locked()

    def lock(self) -> None:
        """Nobody locks what is locked."""

    def unlock(self) -> None:
        """The worker has filled it, or LMCache drops it."""
        self.end()
        self.own.unlock()

    def end(self) -> None:
        self.entry.write_lock = self.own
        self.stores.held.pop(self, None)

    def is_there(self) -> bool:
        """Not so where it was filled meanwhile, or dropped by an operator's command. Under its L1's own lock."""
        if reserved(self.l1, self.key) is self.entry and self.entry.write_lock is self:
            return True
        self.stores.held.pop(self, None)
        return False


class Stores:
    """The stores by one name for which room was made, until all of them have ended, or their room is gone.

    A worker that is given room sends COMMIT_STORE once, after its copy, or one message, and does not copy. A worker
    that is given none sends one message, or nothing. So each store ends at most once.
    """

    def __init__(self) -> None:
        self.under_way = 0  # stores that were given room, and have not ended
        self.refused = 0  # stores that were given none meanwhile, and whose message has not come
        self.alone = True  # else a COMMIT_STORE may be of any of several stores
        self.number = 0  # of objects for which room was made
        self.held: dict[Held, None] = {}  # changed by single calls, each under its L1's own lock
        self.kept: list[tuple[Any, Any]] = []  # L1 and memory, since the registration has ended

    def reserved_keys(self) -> list[Any]:
        """Returns the keys of objects that are still reserved for these stores."""
        found: dict[Any, None] = {}
        for held in list(self.held):
            with held.l1._lock:
                if held.is_there():
                    found[held.key] = None
        return list(found)

    def hold(self, aside: Callable[[], bool], storage: Any, keys: list[Any]) -> None:
        """Room was made for these keys."""
        self.number += len(keys)
        for l1 in l1s(storage):
            with l1._lock:
                for key in keys:
                    entry = reserved(l1, key)
                    if entry is not None and entry.write_lock.is_locked():
                        self.held[Held(aside, self, l1, key, entry)] = None

    def take_out(self) -> int:
        """Takes objects that are not filled out of the index, and keeps their memory; returns how many."""
        before = len(self.kept)
        for held in list(self.held):
            with held.l1._lock:
                if held.is_there():
                    self.kept.append((held.l1, held.entry.memory_obj))
                    take_out(held.l1, held.key)
                    held.end()
        return len(self.kept) - before

    def free(self) -> int:
        """Gives all their memory back, unread: no worker copies into it any more. Returns how many objects."""
        self.take_out()
        kept, self.kept = self.kept, []
        for l1, memory in kept:
            with l1._lock:
                l1._memory_manager.free([memory])
        return len(kept)


class Worker:
    """The stores of one worker's number, by key and request. It exists as long as it holds anything."""

    def __init__(self) -> None:
        self.turn = threading.Lock()  # held while a store begins or ends, or the registration does
        self.stores: dict[Name, dict[str, Stores]] = {}
        self.unheard = 0  # messages that may come yet of stores without room, by names whose other stores have ended

    def of(self, store: Store) -> Stores | None:
        return self.stores.get(store[1], {}).get(store[2])

    def begin(self, store: Store) -> Stores:
        """Notes that room was made. Where another store by this name is under way, their ends cannot be told apart."""
        stores = self.stores.setdefault(store[1], {}).setdefault(store[2], Stores())
        stores.alone = not stores.under_way
        stores.under_way += 1
        return stores

    def end(self, store: Store) -> None:
        """Forgets a name: all its stores have ended, or their room is gone."""
        named = self.stores[store[1]]
        self.unheard += named.pop(store[2]).refused
        if not named:
            del self.stores[store[1]]

    def others(self, store: Store) -> list[Any]:
        """Returns the keys that are reserved for stores which LMCache takes for this one, and which go on."""
        named = self.stores.get(store[1], {})
        return list(dict.fromkeys(key for stores in named.values() for key in stores.reserved_keys()))

    def keep(self) -> int:
        """Takes all that was not filled out of the index: the registration has ended. Returns how many objects."""
        taken = 0
        for key, named in list(self.stores.items()):
            for request, stores in list(named.items()):
                taken += stores.take_out()
                if not stores.kept:
                    self.end((0, key, request))
        return taken


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
    workers: dict[int, Worker] = {}

    def aside() -> bool:
        """A patch that stands aside leaves the locks, as the release's own: COMMIT_STORE ends each, without it too."""
        return livepatch.aside

    @contextlib.contextmanager
    def turn(module: Any, number: int) -> Iterator[Worker]:
        """A worker's turn. After it, a worker that holds nothing is forgotten.

        An unheard message is waited for until the registration ends. To 0.4.7 that may be another process's, since a
        number is the id of a process: there it is waited for without an end, by one count for each such number.
        """
        while True:
            worker = workers.setdefault(number, Worker())
            with worker.turn:
                if workers.get(number) is not worker:
                    continue  # it went while this one waited
                try:
                    yield worker
                finally:
                    heard = not worker.unheard or (number not in registered(module) and is_one_process(module))
                    if heard and not worker.stores:
                        del workers[number]
                return

    def prepare_store(original: Call, module: Any, key: Any, instance_id: int, *rest: Any, **named: Any) -> Any:
        """Let no time end what is reserved."""
        store = store_of(module, key, instance_id)
        with turn(module, store[0]) as worker:
            answer = original(key, instance_id, *rest, **named)
            if answer.context.get("slots"):  # else all is there, or goes through messages
                hold(module, worker, store, answer)
            elif (stores := worker.of(store)) is not None:
                stores.refused += 1
        return answer

    def hold(module: Any, worker: Worker, store: Store, answer: Any) -> None:
        stores = worker.begin(store)
        keys = module._resolve_single_group_obj_keys(store[1].key)
        stores.hold(aside, module._ctx.storage_manager, [keys[index] for index in answer.context["chunk_indices"]])
        if store[0] not in registered(module):  # its goodbye came meanwhile, and found nothing
            ended(module, worker, store[0])

    def ended(module: Any, worker: Worker, number: int) -> None:
        with module._pending_shm_lock:
            for name in [name for name in module._pending_shm_writes if name[0] == number]:
                del module._pending_shm_writes[name]
        kept = worker.keep()
        if kept:
            livepatch.tell(
                "kept_apart", f"a worker went in a store: {kept} chunks that it did not fill are kept apart", kept
            )

    def release_entry(original: Call, module: Any, instance_id: int, *rest: Any, **named: Any) -> Any:
        """A registration has ended. LMCache ends the loads that it began, and finds no stores to be ended."""
        with turn(module, instance_id) as worker:
            ended(module, worker, instance_id)
            return original(instance_id, *rest, **named)

    def commit_store(
        original: Call, module: Any, key: Any, instance_id: int, cpu_data: Any, *rest: Any, **named: Any
    ) -> Any:
        """The worker has copied, or sends what it stores in a message."""
        store = store_of(module, key, instance_id)
        if cpu_data:
            with turn(module, store[0]) as worker:
                sent(module, worker, store)
            return original(key, instance_id, cpu_data, *rest, **named)
        # Else its registration could end, and another store begin, before LMCache ends this one.
        with turn(module, store[0]) as worker:
            stores = has_ended(worker, store)
            if stores is not None and (stores.kept or not stores.alone):
                livepatch.count("given_back", stores.free())
                pending_of(module, store, worker.others(store))
                return False  # too late to be given out, or several stores filled it in an order that is not known
            keys = [] if stores is None else stores.reserved_keys()
            # As nearly always: what LMCache finds is this store's, all of it, and it takes that out itself.
            known = stores is not None and len(keys) == stores.number and not worker.others(store)
            if not known:
                pending_of(module, store, keys)
            try:
                return original(key, instance_id, cpu_data, *rest, **named)
            except BaseException:
                known = False
                raise
            finally:
                if stores is not None:
                    stores.free()  # after an error LMCache has not ended it: the worker has copied, and nobody reads it
                if not known:
                    pending_of(module, store, worker.others(store))

    def has_ended(worker: Worker, store: Store) -> Stores | None:
        """Notes that a store has ended. Returns all stores by its name where it was the last of them, else None."""
        stores = worker.of(store)
        if stores is None:
            return None
        stores.under_way -= 1
        if stores.under_way:
            return None
        worker.end(store)
        return stores

    def pending_of(module: Any, store: Store, keys: list[Any]) -> None:
        """What LMCache finds reserved under a store's name."""
        name = store[0], store[1].key
        with module._pending_shm_lock:
            module._pending_shm_writes.pop(name, None)
            if keys:
                module._pending_shm_writes[name] = keys

    def sent(module: Any, worker: Worker, store: Store) -> None:
        """LMCache would leave the message out: there is room for its chunks already, of which nobody fills any."""
        stores = worker.of(store)
        if stores is not None and stores.refused:  # the message may be that one's
            stores.refused -= 1
        elif worker.unheard:
            worker.unheard -= 1
        elif (last := has_ended(worker, store)) is not None and (number := last.free()):
            why = "a worker cannot map this server's shared memory (another container's /dev/shm?)"
            livepatch.tell("sent", f"{why}: what it stores comes in messages, and what it loads fails", number)
        pending_of(module, store, worker.others(store))

    return {
        f"{MODULE}._release_entry": release_entry,
        f"{MODULE_0_4_7}.unregister_kv_cache": release_entry,
        **{f"{module}.commit_store": commit_store for module in (MODULE, MODULE_0_4_7)},
        **{f"{module}.prepare_store": prepare_store for module in (MODULE, MODULE_0_4_7)},
    }


def is_one_process(module: Any) -> bool:
    """Whether a worker's number is one process's: from 0.5.0 on it is drawn at random."""
    return not hasattr(module, "_non_gpu_contexts")


def registered(module: Any) -> Any:
    """The workers that are registered, by number."""
    return module._non_gpu_contexts if hasattr(module, "_non_gpu_contexts") else module._engine_driven_contexts


def store_of(module: Any, key: Any, instance_id: int) -> Store:
    number, name = module._make_transfer_key(key, instance_id)
    return number, Name(name), key.request_id
