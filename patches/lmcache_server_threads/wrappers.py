"""LMCache's server goes on after one bad item: no thread of its cache ends, and no request waits, because of one.

Behind the server's memory (L1) stand adapters to disks and other stores (L2), and threads that evict, store and
prefetch. An error ends an evicting thread. Where an adapter raises at a submission, LMCache to 0.5.5 forgets the
request, and nobody answers its lookup; one that never answers holds one of eight places for ever, on every release.
And to 0.5.5 a load that failed is readable, unfilled, before it is deleted.

Source: LMCache#4817, LMCache#4945, LMCache#5032, LMCache#5263, LMCache PR#4384, LMCache PR#4818.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

CONTROLLERS = "lmcache.v1.distributed.storage_controllers"
EVICTION = f"{CONTROLLERS}.eviction_controller"
STORE = f"{CONTROLLERS}.store_controller"
PREFETCH = f"{CONTROLLERS}.prefetch_controller"
ISOLATED = "lmcache.v1.distributed.eviction_policy.isolated_lru:IsolatedLRUEvictionPolicy"
L1 = "lmcache.v1.distributed.l1_manager:L1Manager"
INTERFACES = "lmcache.v1.distributed.internal_api"
ERRORS = "lmcache.v1.distributed.error"

SHIELD = "_livepatch_shield"
"""Attribute of an adapter: what is known of its tasks."""
SIGNALS = 3
"""Signals for a task, one in each round of the thread, after which LMCache has asked for it, if it asks at all."""
PAUSE = 1.0
"""Seconds between an error that left a thread's loop and the next round of that loop."""


class Task:
    """A lookup or a load that an adapter was given: its keys, and of a load the memory that it fills."""

    def __init__(self, keys: list[Any], objects: list[Any] | None, until: float) -> None:
        self.keys, self.objects, self.until = list(keys), list(objects or ()), until
        self.signals = 0
        self.kept: list[Any] = []  # memory that LMCache would have freed, and the adapter may still fill


class Shield:
    """The tasks of one adapter, by kind and number, until they have ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.under_way: dict[tuple[str, int], Task] = {}
        self.given_up: dict[tuple[str, int], Task] = {}  # answered here; the adapter may still work on them
        self.refused: dict[tuple[str, int], int] = {}  # never begun: how many keys they had
        self.refused_stores: list[int] = []
        self.next = -1  # LMCache's own numbers are 0 and more

    def number(self) -> int:
        self.next -= 1
        return self.next


class Mine:
    """A write lock that holds for everybody but this thread, which deletes the object."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def is_locked(self) -> bool:
        return threading.get_ident() != self.thread

    def lock(self) -> None: ...

    def unlock(self) -> None: ...


def adapters_of(controller: Any) -> dict[int, Any]:
    """A controller's adapters by number; to 0.4.7 LMCache has a list."""
    adapters = controller._l2_adapters
    return dict(adapters if isinstance(adapters, dict) else enumerate(adapters))


def loaded_of(request: Any) -> set[Any]:
    """The keys of a prefetch request that its adapters have loaded (LMCache to 0.5.5)."""
    loaded: set[Any] = set()
    for adapter, planned in request.load_plan.items():
        result = request.load_results.get(adapter)
        if result is not None:
            loaded.update(result.gather(planned.gather(request.keys)))
    return loaded


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    ending = threading.local()  # .request: the prefetch request that this thread ends

    # Threads

    def lasting_loop(original: Call, controller: Any, *rest: Any, **named: Any) -> Any:
        """Begins a thread's loop anew after an error that left it."""
        while True:
            try:
                return original(*rest, **named)
            except Exception as error:
                thread_error(controller, error)
            if controller._stop_flag.wait(PAUSE):
                return None

    def check_and_evict(original: Call, controller: Any, *rest: Any, **named: Any) -> Any:
        """One adapter that raises keeps no other from being asked."""
        try:
            return original(*rest, **named)
        except Exception as error:
            thread_error(controller, error)

    def thread_error(controller: Any, error: Exception) -> None:
        where = type(controller).__name__
        livepatch.tell("thread_errors", f"an error in the thread of {where}, which goes on: {error!r}")

    def eviction_actions(
        original: Call,
        policy: Any,
        expected_ratio: float,
        key_eligible_filter: Any = None,
        cache_salt: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """L1 asks without a tenant, for which the policy raises: then each tenant's part is asked for."""
        if cache_salt is not None:
            return original(expected_ratio, key_eligible_filter, cache_salt, *rest, **named)
        with policy._lock:
            salts = list(policy._per_salt_order)
        return [
            action for salt in salts for action in original(expected_ratio, key_eligible_filter, salt, *rest, **named)
        ]

    # Adapters

    def made(answer: Any, controller: Any, *rest: Any, **named: Any) -> None:
        for adapter in adapters_of(controller).values():
            shield(adapter)

    def added(controller: Any, adapter_id: int, adapter: Any, *rest: Any, **named: Any) -> None:
        shield(adapter)

    def shield(adapter: Any) -> None:
        if SHIELD in vars(adapter):
            return
        setattr(adapter, SHIELD, Shield())
        for name, wrapper in BY_NAME.items():
            livepatch.around_its(adapter, name, wrapper)

    def refuse(adapter: Any, what: str, error: Exception) -> None:
        livepatch.tell("adapter_errors", f"{type(adapter).__name__} raised, and {what}: {error!r}")

    def submitted(kind: str, original: Call, adapter: Any, keys: Any, rest: Any, named: Any) -> Any:
        own: Shield = vars(adapter)[SHIELD]
        objects = None if kind == "lookup" else (rest[0] if rest else named.get("objects"))
        task = Task(keys, objects, time.monotonic() + livepatch.options["SECONDS"])
        try:
            number = original(keys, *rest, **named)
        except Exception as error:
            refuse(adapter, f"a {kind} of {len(keys)} chunks has found none", error)
            number = own.number()
            with own.lock:
                own.refused[kind, number] = len(keys)
            signal(adapter, kind)
            return number
        with own.lock:
            own.under_way[kind, number] = task
        return number

    def queried(kind: str, original: Call, adapter: Any, task_id: int) -> Any:
        own: Shield = vars(adapter)[SHIELD]
        with own.lock:
            refused = own.refused.pop((kind, task_id), None)
            task = own.under_way.get((kind, task_id))
        if refused is not None:
            return nothing_of(refused)
        result = original(task_id)
        if task is None or (result is None and time.monotonic() < task.until):
            return result
        if result is not None:
            with own.lock:
                own.under_way.pop((kind, task_id), None)
            return result
        give_up(own, (kind, task_id), keep=True)
        what = f"{type(adapter).__name__} has not answered a {kind} of {len(task.keys)} chunks: they count as missing"
        livepatch.tell("given_up", what, len(task.keys))
        return nothing_of(len(task.keys))

    def lookup(original: Call, adapter: Any, keys: Any, *rest: Any, **named: Any) -> Any:
        return submitted("lookup", original, adapter, keys, rest, named)

    def load(original: Call, adapter: Any, keys: Any, *rest: Any, **named: Any) -> Any:
        return submitted("load", original, adapter, keys, rest, named)

    def looked_up(original: Call, adapter: Any, task_id: int) -> Any:
        return queried("lookup", original, adapter, task_id)

    def loaded(original: Call, adapter: Any, task_id: int) -> Any:
        return queried("load", original, adapter, task_id)

    def unlock(original: Call, adapter: Any, *rest: Any, **named: Any) -> None:
        try:
            original(*rest, **named)
        except Exception as error:
            refuse(adapter, "chunks stay locked there", error)

    def store(original: Call, adapter: Any, keys: Any, *rest: Any, **named: Any) -> Any:
        try:
            return original(keys, *rest, **named)
        except Exception as error:
            refuse(adapter, f"{len(keys)} chunks are not stored", error)
        own: Shield = vars(adapter)[SHIELD]
        with own.lock:
            number = own.number()
            own.refused_stores.append(number)
        signal(adapter, "store")
        return number

    def stored(original: Call, adapter: Any, *rest: Any, **named: Any) -> Any:
        answer = original(*rest, **named)
        own: Shield = vars(adapter)[SHIELD]
        with own.lock:
            failed, own.refused_stores = own.refused_stores, []
        if not failed:
            return answer
        kind = getattr(sys.modules.get(INTERFACES), "L2StoreResult", None)  # to 0.4.4 a truth value
        return answer | {number: kind(False, 0) if kind else False for number in failed}

    BY_NAME: dict[str, Call] = {
        "submit_lookup_and_lock_task": lookup,
        "query_lookup_and_lock_result": looked_up,
        "submit_load_task": load,
        "query_load_result": loaded,
        "submit_unlock": unlock,
        "submit_store_task": store,
        "pop_completed_store_tasks": stored,
    }

    def nothing_of(number: int) -> Any:
        return sys.modules[PREFETCH].Bitmap(number)

    def signal(adapter: Any, kind: str) -> None:
        """Wakes the controller, which asks for the results of adapters that have signalled alone."""
        name = {"lookup": "get_lookup_and_lock_event_fd", "load": "get_load_event_fd", "store": "get_store_event_fd"}
        with contextlib.suppress(OSError):
            os.eventfd_write(getattr(adapter, name[kind])(), 1)

    def overdue(controller: Any, *rest: Any, **named: Any) -> None:
        """At each round of the prefetching thread: signals what is overdue, and ends what was given up."""
        now = time.monotonic()
        for adapter in adapters_of(controller).values():
            own: Shield = vars(adapter)[SHIELD]
            for (kind, number), task in list(own.under_way.items()):
                if now < task.until:
                    continue
                task.signals += 1
                if task.signals > SIGNALS:  # LMCache has dropped the request
                    give_up(own, (kind, number), keep=False)
                else:
                    signal(adapter, kind)
            for which, task in list(own.given_up.items()):
                end(adapter, own, which, task)

    def dropped(controller: Any, request: Any, *rest: Any, **named: Any) -> None:
        """A request is dropped whose loads are under way: LMCache frees the memory that they fill."""
        adapters = adapters_of(controller)
        tasks = vars(request).get("inflight_load_tasks") or vars(request).get("pending_load_tasks") or {}
        for index, number in tasks.items():
            if index in adapters:
                give_up(vars(adapters[index])[SHIELD], ("load", number), keep=True)

    def all_dropped(controller: Any, *rest: Any, **named: Any) -> None:
        for request in list(controller._in_flight_requests.values()):
            dropped(controller, request)

    def give_up(own: Shield, which: tuple[str, int], keep: bool) -> None:
        """From now on nobody waits for a task. `keep`: LMCache is about to free its memory, and is kept from that."""
        with own.lock:
            task = own.under_way.pop(which, None)
            if task is None:
                return
            own.given_up[which] = task
        for memory in task.objects if keep else ():
            memory.invalidate()  # LMCache's allocators free no such memory
            task.kept.append(memory)

    def end(adapter: Any, own: Shield, which: tuple[str, int], task: Task) -> None:
        """What an adapter was late with: chunks that it found are unlocked, and memory that it filled is free."""
        kind, number = which
        query = adapter.query_lookup_and_lock_result if kind == "lookup" else adapter.query_load_result
        try:
            result = query(number)  # through `queried`, which no longer knows it
        except Exception as error:  # nobody will learn when it has ended
            refuse(adapter, f"memory of {len(task.kept)} chunks is lost", error)
            task.kept, result = [], nothing_of(len(task.keys))
        if result is None:
            return
        with own.lock:
            del own.given_up[which]
        if kind == "lookup":
            found = result.gather(task.keys)
            if found:
                adapter.submit_unlock(found)
        for memory in task.kept:
            memory.valid = True
            memory.parent_allocator.free(memory)

    # Loads that failed (to 0.5.5)

    @contextlib.contextmanager
    def of(request: Any) -> Iterator[None]:
        before = getattr(ending, "request", None)
        ending.request = request
        try:
            yield
        finally:
            ending.request = before

    def end_request(original: Call, controller: Any, request: Any, *rest: Any, **named: Any) -> Any:
        with of(request):
            return original(request, *rest, **named)

    def finish_write(original: Call, l1: Any, keys: Any, *rest: Any, **named: Any) -> Any:
        """What a load did not fill is not readable before LMCache deletes it, which is what this thread does next."""
        request = getattr(ending, "request", None)
        if request is None or not keys or keys[0] not in vars(request).get("write_reserved_objs", ()):
            return original(keys, *rest, **named)
        filled = loaded_of(request)
        unfilled = [key for key in keys if key not in filled]
        if len(unfilled) < len(keys):
            return original(keys, *rest, **named)
        livepatch.count("unfilled", len(unfilled))
        success = sys.modules[ERRORS].L1Error.SUCCESS
        with l1._lock:
            for key in unfilled:
                entry = l1._objects.get(key)
                if entry is not None and entry.memory_obj is request.write_reserved_objs[key]:
                    entry.write_lock = Mine()
        return dict.fromkeys(keys, success)

    return {
        f"{EVICTION}:L1EvictionController.eviction_loop": lasting_loop,
        f"{EVICTION}:L2EvictionController._eviction_loop": lasting_loop,
        f"{EVICTION}:L2EvictionController._check_and_evict": check_and_evict,
        f"{ISOLATED}.get_eviction_actions": eviction_actions,
        f"{STORE}:StoreController._store_loop": lasting_loop,
        f"{STORE}:StoreController.__init__": livepatch.after(made),
        f"{STORE}:StoreController.add_adapter": livepatch.before(added),
        f"{PREFETCH}:PrefetchController._prefetch_loop": lasting_loop,
        f"{PREFETCH}:PrefetchController.__init__": livepatch.after(made),
        f"{PREFETCH}:PrefetchController.add_adapter": livepatch.before(added),
        f"{PREFETCH}:PrefetchController._start_pending_requests": livepatch.before(overdue),
        f"{PREFETCH}:PrefetchController._release_all_locks": livepatch.before(dropped),
        f"{PREFETCH}:PrefetchController._cleanup_in_flight_requests": livepatch.before(all_dropped),
        f"{PREFETCH}:PrefetchController._transition_to_load_phase": end_request,
        f"{PREFETCH}:PrefetchController._finalize_load": end_request,
        f"{PREFETCH}:PrefetchController._finish_request": end_request,
        f"{L1}.finish_write": finish_write,
    }
