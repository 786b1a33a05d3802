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

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]
Store = tuple[int, Any, str]
"""A worker's number, the key of what it stores, and the request. LMCache knows a store that was begun by the first two
alone; requests may store the same, and to 0.4.7 processes of two containers may have one number.
"""

STORAGE = "lmcache.v1.distributed.storage_manager"
MODULE = "lmcache.v1.multiprocess.modules.engine_driven_transfer:EngineDrivenTransferModule"
MODULE_0_4_7 = "lmcache.v1.multiprocess.modules.non_gpu_transfer:NonGPUTransferModule"
"""The same under another name. Its workers' registrations end by their goodbye alone."""


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

    Who is given room says once that it has copied, or sends a message and does not copy. Who is given none while others
    may copy sends a message, or nothing.
    """

    def __init__(self) -> None:
        self.under_way = 0  # who was given room, and has said nothing yet
        self.refused = 0  # who was given none meanwhile, and has sent no message
        self.alone = True  # else nobody knows which of them a COMMIT_STORE is of
        self.held: dict[Held, None] = {}  # changed by single calls, each under its L1's own lock
        self.kept: list[tuple[Any, Any]] = []  # L1 and memory, since the registration has ended

    def keys(self) -> list[Any]:
        """What is reserved for them, and is there."""
        found = {}
        for held in list(self.held):
            with held.l1._lock:
                if held.is_there():
                    found[held.key] = None
        return list(found)

    def hold(self, aside: Callable[[], bool], storage: Any, keys: list[Any]) -> None:
        """Room was made for these keys."""
        for l1 in l1s(storage):
            with l1._lock:
                for key in keys:
                    entry = reserved(l1, key)
                    if entry is not None and entry.write_lock.is_locked():
                        self.held[Held(aside, self, l1, key, entry)] = None

    def take_out(self) -> int:
        """Keep what is not filled from everybody; how many objects."""
        before = len(self.kept)
        for held in list(self.held):
            with held.l1._lock:
                if held.is_there():
                    self.kept.append((held.l1, held.entry.memory_obj))
                    take_out(held.l1, held.key)
                    held.end()
        return len(self.kept) - before

    def free(self) -> int:
        """Nobody copies into their room any more, and nobody is given what is in it; how many objects."""
        self.take_out()
        kept, self.kept = self.kept, []
        for l1, memory in kept:
            with l1._lock:
                l1._memory_manager.free([memory])
        return len(kept)


class Worker:
    """What is reserved for one worker's number, by key and request. It is there as long as there is something to know."""

    def __init__(self) -> None:
        self.turn = threading.Lock()  # a store begins or ends, or the registration does
        self.stores: dict[Any, dict[str, Stores]] = {}
        self.unheard = 0  # messages that may come yet, of who was given no room, and whose name's stores have ended

    def of(self, store: Store) -> Stores | None:
        return self.stores.get(store[1], {}).get(store[2])

    def begin(self, store: Store) -> Stores:
        """Room was made. Where others by this name may be under way, their ends cannot be told apart from now on."""
        stores = self.stores.setdefault(store[1], {}).setdefault(store[2], Stores())
        stores.alone = not stores.under_way
        stores.under_way += 1
        return stores

    def end(self, store: Store) -> None:
        """All by this name have ended, or their room is gone."""
        named = self.stores[store[1]]
        self.unheard += named.pop(store[2]).refused
        if not named:
            del self.stores[store[1]]

    def others(self, store: Store) -> list[Any]:
        """What is reserved for stores that LMCache takes for the same, and that this one's end does not end."""
        named = self.stores.get(store[1], {})
        return list(dict.fromkeys(key for stores in named.values() for key in stores.keys()))

    def keep(self) -> int:
        """Its registration has ended: nothing that it has not filled is given to anybody; how many objects."""
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
    """At each target: a look at its calls, or a wrapper in wrapt's form (wrapped, instance, args, kwargs)."""
    workers: dict[int, Worker] = {}

    def aside() -> bool:
        """A patch that stands aside leaves the locks, as the release's own: COMMIT_STORE ends each, without it too."""
        return livepatch.aside

    @contextlib.contextmanager
    def turn(module: Any, number: int) -> Iterator[Worker]:
        """A worker's turn. What is known of it goes where nothing is under way; an unheard message, with the registration.

        To 0.4.7 that need not be its sender's: several processes may have one number, which is the id of a process.
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

    def prepare_store(wrapped: Call, module: Any, args: Any, kwargs: Any) -> Any:
        """Let no time end what is reserved."""
        store = store_of(module, **named(args, kwargs))
        with turn(module, store[0]) as worker:
            answer = wrapped(*args, **kwargs)
            if answer.context.get("slots"):  # else all is there, or goes through messages
                hold(module, worker, store, answer)
            elif (stores := worker.of(store)) is not None:
                stores.refused += 1
        return answer

    def hold(module: Any, worker: Worker, store: Store, answer: Any) -> None:
        stores = worker.begin(store)
        keys = module._resolve_single_group_obj_keys(store[1])
        stores.hold(aside, module._ctx.storage_manager, [keys[index] for index in answer.context["chunk_indices"]])
        if store[0] not in registered(module):  # its goodbye came meanwhile, and found nothing
            ended(module, worker, store[0])

    def ended(module: Any, worker: Worker, number: int) -> None:
        with module._pending_shm_lock:
            for name in [name for name in module._pending_shm_writes if name[0] == number]:
                del module._pending_shm_writes[name]
        kept = worker.keep()
        if kept:
            livepatch.count("kept_apart", kept)
            livepatch.say("kept_apart", f"a worker went in a store: {kept} chunks that it did not fill are kept apart")

    def release_entry(wrapped: Call, module: Any, args: Any, kwargs: Any) -> Any:
        """A registration has ended. LMCache ends the loads that it began, and finds no stores to be ended."""
        number = args[0] if args else kwargs["instance_id"]
        with turn(module, number) as worker:
            ended(module, worker, number)
            return wrapped(*args, **kwargs)

    def commit_store(wrapped: Call, module: Any, args: Any, kwargs: Any) -> Any:
        """The worker has copied, or sends what it stores in a message."""
        asked = named(args, kwargs)
        in_message = asked.pop("cpu_data")
        store = store_of(module, **asked)
        if in_message:
            with turn(module, store[0]) as worker:
                sent(module, worker, store)
            return wrapped(*args, **kwargs)
        # Else its registration could end, and another store begin, before LMCache ends this one.
        with turn(module, store[0]) as worker:
            stores = has_ended(worker, store)
            if stores is not None and (stores.kept or not stores.alone):
                livepatch.count("given_back", stores.free())
                pending_of(module, store, worker.others(store))
                return False  # too late to be given out, or nobody knows what of it is another's
            pending_of(module, store, [] if stores is None else stores.keys())
            try:
                return wrapped(*args, **kwargs)
            finally:
                if stores is not None:
                    stores.free()  # what LMCache has not ended, by an error: the worker has copied, and nobody is given it
                pending_of(module, store, worker.others(store))

    def has_ended(worker: Worker, store: Store) -> Stores | None:
        """A store has ended; all stores by its name, where it was the last of them."""
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
        with module._pending_shm_lock:
            module._pending_shm_writes.pop(store[:2], None)
            if keys:
                module._pending_shm_writes[store[:2]] = keys

    def sent(module: Any, worker: Worker, store: Store) -> None:
        """LMCache would leave the message out: there is room for its chunks already, of which nobody fills any."""
        stores = worker.of(store)
        if stores is not None and stores.refused:  # the message may be that one's
            stores.refused -= 1
        elif worker.unheard:
            worker.unheard -= 1
        elif (last := has_ended(worker, store)) is not None and (number := last.free()):
            livepatch.count("sent", number)
            why = "a worker cannot map this server's shared memory (another container's /dev/shm?)"
            livepatch.say("sent", f"{why}: what it stores comes in messages, and what it loads fails")
        pending_of(module, store, worker.others(store))

    return {
        f"{MODULE}._release_entry": release_entry,
        f"{MODULE_0_4_7}.unregister_kv_cache": release_entry,
        **{f"{module}.commit_store": commit_store for module in (MODULE, MODULE_0_4_7)},
        **{f"{module}.prepare_store": prepare_store for module in (MODULE, MODULE_0_4_7)},
    }


def is_one_process(module: Any) -> bool:
    """Whether a worker's number is its own: from 0.5.0 on."""
    return not hasattr(module, "_non_gpu_contexts")


def registered(module: Any) -> Any:
    """The workers that are registered, by number."""
    return module._non_gpu_contexts if hasattr(module, "_non_gpu_contexts") else module._engine_driven_contexts


def store_of(module: Any, key: Any, instance_id: int) -> Store:
    return (*module._make_transfer_key(key, instance_id), key.request_id)


def named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a store is asked for with, in LMCache's order: a key, a worker's number, and at its end what is sent."""
    return {**dict(zip(("key", "instance_id", "cpu_data"), args, strict=False)), **kwargs}
