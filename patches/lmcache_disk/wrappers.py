"""LMCache's disk and memory, in the engine's process, give whole chunks or none, and give back what they take.

A load reads a chunk from a file into memory that it takes from LMCache's CPU pool. LMCache ignores how many bytes
came, and where memory runs out at a later chunk it hands out the earlier ones without reading them, while it holds the
lock of the whole backend. What fails leaves memory, pins, keys under way and room on the disk taken. A wait for memory
has no end. A lookup of which one tier raises is never answered. And memory that Python's garbage collector frees takes
locks that its thread may hold.

Source: LMCache#3022, LMCache#3855, LMCache#2942, LMCache#3533, LMCache PR#3292 (its own reads of `readinto`); the rest
was found here.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import contextvars
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

BACKEND = "lmcache.v1.storage_backend.local_disk_backend"
DISK = f"{BACKEND}:LocalDiskBackend"
MEMORY = "lmcache.v1.storage_backend.local_cpu_backend:LocalCPUBackend"
MANAGER = "lmcache.v1.storage_backend.storage_manager"
OBJECTS = "lmcache.v1.memory_management"
SENDER = "lmcache.v1.storage_backend.batched_message_sender:BatchedMessageSender"
RLOCK: Any = type(threading.RLock())
LAYER_BY_LAYER = "fake_lookup_id"
"""LMCache's name of a load that goes layer by layer: its caller takes it that every chunk comes."""
HERE = uuid.uuid4().hex
"""Of this process, and of no engine in another container that writes to the same directory."""
TICK = 0.1
"""Seconds between two tries for memory, as in LMCache's own loop: nothing says when memory comes back."""


class Staging:
    """The memory that one load takes, and until when it waits for more (by `time.monotonic()`)."""

    def __init__(self, until: float = 0.0) -> None:
        self.taken: list[Any] = []
        self.until = until
        self.refused = 0  # chunks for which none came


class Lookup:
    """What one asynchronous lookup has loaded, until it is answered; and whether it was given up."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.given_up = False


class Writing:
    """How far one write came: whether its bytes count as used, and whether they are on the disk."""

    begun = written = False


# Context variables, not thread-local: while one load awaits its reads, others take memory on the event loop's thread.
STAGING: contextvars.ContextVar[Staging | None] = contextvars.ContextVar("lmcache-disk staging", default=None)
WRITING: contextvars.ContextVar[Writing | None] = contextvars.ContextVar("lmcache-disk writing", default=None)
LOOKUP: contextvars.ContextVar[Lookup | None] = contextvars.ContextVar("lmcache-disk lookup", default=None)
LOOKED_UP: contextvars.ContextVar[frozenset[Any]] = contextvars.ContextVar("lmcache-disk keys", default=frozenset())
"""The keys that this task's lookup has pinned. The load is a task that the lookup begins, and has its context."""


@contextlib.contextmanager
def within(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def read(path: str, buffer: Any, direct: bool) -> None:
    """Fills the buffer from a file of exactly its size, or raises OSError."""
    view = memoryview(buffer).cast("B")
    with open(path, "rb", buffering=0, opener=opener(direct, 0o666)) as file:
        size, came = os.fstat(file.fileno()).st_size, 0
        if size == len(view):
            while came < size and (more := file.readinto(view[came:])):
                came += more
        if came != len(view):
            raise OSError(f"{path}: a file of {size} bytes, of which {came} were read, for a chunk of {len(view)}")


def write(path: str, buffer: Any, direct: bool) -> None:
    """Writes the whole buffer, or raises OSError and leaves what is at `path` as it was."""
    view = memoryview(buffer).cast("B")
    # A name of its own length: a key's name may be as long as the file system allows.
    part = os.path.join(os.path.dirname(path), f".{HERE}-{os.getpid()}-{threading.get_ident()}.part")
    try:
        with open(part, "wb", buffering=0, opener=opener(direct, 0o644 if direct else 0o666)) as file:
            done = 0
            while done < len(view):
                done += file.write(view[done:]) or 0
        os.replace(part, path)  # who reads `path` meanwhile reads a whole file
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise


def opener(direct: bool, mode: int) -> Callable[[str, int], int]:
    return lambda path, flags: os.open(path, flags | (os.O_DIRECT if direct else 0), mode)


def is_direct(backend: Any, buffer: Any) -> bool:
    """As LMCache decides."""
    return bool(backend.use_odirect and len(buffer) % backend.os_disk_bs == 0)


def is_held(lock: Any) -> bool:
    """Whether this thread holds the backend's lock. A lock of a backend that was made before the patch says nothing."""
    return isinstance(lock, RLOCK) and bool(lock._is_owned())


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    impatient: weakref.WeakSet[Any] = weakref.WeakSet()  # disks and CPU pools whose last wait came to nothing
    orphans: collections.deque[Any] = collections.deque()  # memory that a thread is to free
    freeing = threading.Lock()  # held while there is such a thread

    def init(answer: Any, backend: Any, *rest: Any, **named: Any) -> None:
        """A lock that knows its owner: after an error inside LMCache's own code, whether that holds it is seen."""
        backend.disk_lock = threading.RLock()

    def missing(key: Any, error: object) -> None:
        livepatch.tell("missing", f"a chunk on the disk could not be loaded and counts as missing: {error} ({key})")

    # What leaves

    def forget(backend: Any, key: Any) -> None:
        """Take a chunk whose file is of no use out of the index, with its file. What it used up is free again."""
        with backend.disk_lock:
            entry = backend.dict.pop(key, None)
            if entry is None:
                return
            backend.cache_policy.update_on_force_evict(key)
            backend.usage -= entry.size
            backend.current_cache_size -= entry.size
            backend.stats_monitor.update_local_storage_usage(backend.usage)
            with contextlib.suppress(OSError):
                os.remove(entry.path)
        tell_evicted(backend, key)

    def tell_evicted(backend: Any, key: Any) -> None:
        if backend.batched_msg_sender is not None:
            evict = sys.modules[BACKEND].OpType.EVICT
            backend.batched_msg_sender.add_kv_op(op_type=evict, key=key.chunk_hash)

    def remove(original: Call, backend: Any, key: Any, force: bool = True, *rest: Any, **named: Any) -> Any:
        """A chunk leaves also where its file cannot be removed, and what an order to remove it frees is free."""
        outer = is_held(backend.disk_lock)
        mine = force and isinstance(backend.disk_lock, RLOCK)  # LMCache's own part takes it again
        try:
            with backend.disk_lock if mine else contextlib.nullcontext():
                entry = backend.dict.get(key)
                removed = original(key, force, *rest, **named)
        except OSError as error:
            if not outer and is_held(backend.disk_lock):  # to 0.5.0
                backend.disk_lock.release()
            livepatch.tell("unremoved", f"the file of an evicted chunk could not be removed: {error}")
            if force:
                backend.cache_policy.update_on_force_evict(key)
            tell_evicted(backend, key)
            removed = True
        if force and removed and entry is not None:
            with backend.disk_lock:  # an eviction counts that itself
                backend.current_cache_size -= entry.size
        return removed

    def touch(original: Call, backend: Any, *rest: Any, **named: Any) -> Any:
        """What has left since its lookup is not touched: the policy would raise."""
        if not isinstance(backend.disk_lock, RLOCK):
            return original(*rest, **named)
        with backend.disk_lock:  # LMCache's own part takes it again
            backend.keys_in_request = [key for key in backend.keys_in_request if key in backend.dict]
            return original(*rest, **named)

    # Loads

    def made(answer: Any, cpu: Any, *rest: Any, **named: Any) -> None:
        """A pool is made. These are no targets: LMCache's dummy of a pool, which a scheduler has, overrides one."""
        livepatch.around_its(cpu, "allocate", allocate)
        livepatch.around_its(cpu, "batched_allocate", batched_allocate)

    def allocate(
        original: Call,
        cpu: Any,
        shapes: Any,
        dtypes: Any,
        fmt: Any = None,
        eviction: bool = True,
        busy_loop: bool = True,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Takes memory, and notes it for the load that it is taken for. LMCache's own loop has no end."""

        def tried() -> Any:
            return original(shapes, dtypes, fmt, eviction, False, *rest, **named)

        staging = STAGING.get()
        if staging is None:
            return waited(cpu, tried) if eviction and busy_loop else tried()
        memory = tried()
        while memory is None and time.monotonic() < staging.until:
            time.sleep(TICK)
            memory = tried()
        if memory is None:
            staging.refused += 1
        else:
            staging.taken.append(memory)
        return memory

    def batched_allocate(
        original: Call,
        cpu: Any,
        shapes: Any,
        dtypes: Any,
        batch_size: int,
        fmt: Any = None,
        eviction: bool = True,
        busy_loop: bool = True,
        *rest: Any,
        **named: Any,
    ) -> Any:
        def tried() -> Any:
            return original(shapes, dtypes, batch_size, fmt, eviction, False, *rest, **named)

        return waited(cpu, tried) if eviction and busy_loop else tried()

    def waited(cpu: Any, tried: Callable[[], Any]) -> Any:
        """What others wait for: other tiers' loads, and stores with `force_store_wait`."""
        memory = tried()
        if memory is None and cpu not in impatient:
            until = time.monotonic() + livepatch.options["SECONDS"]
            while memory is None and time.monotonic() < until:
                time.sleep(TICK)
                memory = tried()
        if memory is None:
            impatient.add(cpu)
            refused(1)
        elif impatient:
            impatient.discard(cpu)
        return memory

    def refused(number: int) -> None:
        livepatch.tell("without_memory", "no memory came free in LMCache's CPU pool: a chunk counts as missing", number)

    @contextlib.contextmanager
    def staging(backend: Any) -> Iterator[Staging]:
        """A load that may wait for memory. The next ones do not, until one got some: a prompt has many chunks."""
        one = Staging(0.0 if backend in impatient else time.monotonic() + livepatch.options["SECONDS"])
        with within(STAGING, one):
            yield one
        if one.refused:
            impatient.add(backend)
            refused(one.refused)
        elif one.taken:
            impatient.discard(backend)

    def read_file(original: Call, backend: Any, key: Any, buffer: Any, path: str, *rest: Any, **named: Any) -> None:
        """LMCache's own ignores how many bytes came, and a file that is not there."""
        try:
            read(path, buffer, is_direct(backend, buffer))
        except OSError as error:
            forget(backend, key)
            missing(key, error)
            raise livepatch.deliberate(error)  # noqa: B904 (the same error)

    def load_bytes(original: Call, backend: Any, key: Any, *rest: Any, **named: Any) -> Any:
        with staging(backend) as one:
            try:
                return original(key, *rest, **named)
            except Exception as error:  # a file that is not whole; no memory; a chunk that left meanwhile
                for memory in one.taken:
                    memory.ref_count_down()
                if not one.refused and not isinstance(error, OSError):  # these are said elsewhere
                    missing(key, repr(error))
                return None

    def batch(original: Call, backend: Any, *rest: Any, **named: Any) -> Any:
        """From 0.5.2 on all chunks of a load take memory first."""
        with staging(backend):
            return original(*rest, **named)

    async def contains(
        original: Call, backend: Any, lookup_id: str, keys: Any, pin: bool = False, *rest: Any, **named: Any
    ) -> Any:
        """A lookup pins what it finds, and LMCache never unpins it: it could not leave a full disk any more.

        It also notes each chunk for a call that asynchronous lookups never make: the notes would grow for ever.
        """
        hits = await original(lookup_id, keys, pin, *rest, **named)
        LOOKED_UP.set(frozenset(keys[:hits]) if pin else frozenset())
        with backend.disk_lock:
            backend.keys_in_request = []
        return hits

    async def memory_contains(original: Call, cpu: Any, *rest: Any, **named: Any) -> Any:
        hits = await original(*rest, **named)
        with cpu.cpu_lock:
            cpu.keys_in_request = []
        return hits

    async def prefetch(original: Call, backend: Any, lookup_id: str, keys: Any, *rest: Any, **named: Any) -> Any:
        """Load the chunks from the first on, up to one that cannot be."""
        try:
            with within(STAGING, Staging()):
                loaded = await begun(original, backend, lookup_id, keys, *rest, **named)
        finally:
            unpin(backend, LOOKED_UP.get().intersection(keys))
        if lookup_id == LAYER_BY_LAYER and len(loaded) < len(keys):
            for memory in loaded:
                give_back(memory)
            raise RuntimeError(f"{len(keys) - len(loaded)} of {len(keys)} chunks of a layer could not be loaded")
        return loaded

    async def begun(original: Call, backend: Any, lookup_id: str, keys: Any, *rest: Any, **named: Any) -> Any:
        """LMCache's own load; where that ends with the lock held, what it took memory for is read here."""
        one = STAGING.get()
        assert one is not None
        try:
            answer = await original(lookup_id, keys, *rest, **named)
            if not is_held(backend.disk_lock):
                return answer
            livepatch.tell(
                "without_memory", f"memory for {len(one.taken)} of {len(keys)} chunks: these are loaded", one.refused
            )
        except Exception as error:
            missing(f"of {len(keys)} chunks {len(one.taken)} are loaded", repr(error))
            if not is_held(backend.disk_lock):  # its threads have ended
                for key, memory in zip(keys, one.taken, strict=False):
                    unpin(backend, [key])
                    give_back(memory)
                return []
        backend.disk_lock.release()
        before = keys[: len(one.taken)]
        if not before:
            return []
        return await backend.disk_worker.submit_task(
            "prefetch",
            backend.batched_async_load_bytes_from_disk,
            paths=[backend._key_to_path(key) for key in before],
            keys=before,
            memory_objs=one.taken,
        )

    def load_all(
        original: Call, backend: Any, paths: Any, keys: Any, memory_objs: Any, *rest: Any, **named: Any
    ) -> Any:
        """One after the other: the first that cannot be loaded ends it, and the memory of the rest is given back."""
        asked = zip(paths, keys, memory_objs, strict=False)
        loaded: list[Any] = []
        for path, key, memory in asked:
            try:
                original([path], [key], [memory], *rest, **named)
                loaded.append(memory)
                continue
            except Exception as error:
                if not isinstance(error, OSError):  # that was said
                    missing(key, repr(error))
            for _, left, unread in ((path, key, memory), *asked):
                unpin(backend, [left])
                give_back(unread)
        return loaded

    def unpin(backend: Any, keys: Any) -> None:
        with backend.disk_lock:
            for key in keys:
                if key in backend.dict and backend.dict[key].is_pinned:
                    backend.dict[key].unpin()

    # Lookups of several tiers

    async def from_memory(original: Call, cpu: Any, lookup_id: str, keys: Any, *rest: Any, **named: Any) -> Any:
        """The chunks before the first that has left LMCache's memory since its lookup."""
        with cpu.cpu_lock:
            held = [cpu.hot_cache.get(key) for key in keys]
        try:
            return await original(lookup_id, keys, *rest, **named)
        except KeyError as error:
            if lookup_id == LAYER_BY_LAYER or error.args[0] not in keys:
                raise
            missing(error.args[0], "it has left LMCache's memory")
            return held[: keys.index(error.args[0])]  # these the original has taken

    async def look_up(original: Call, manager: Any, lookup_id: str, *rest: Any, **named: Any) -> Any:
        """Answer a lookup also where a tier cannot be asked: nobody hears of an error here."""
        lookup = Lookup()
        try:
            with within(LOOKUP, lookup):
                return await original(lookup_id, *rest, **named)
        except Exception as error:
            lookup.given_up = True
            give_back_all(lookup.loaded)
            missing(lookup_id, repr(error))
            if manager.async_lookup_server is not None:
                manager.async_lookup_server.send_response_to_scheduler(lookup_id, 0)

    async def load_tier(original: Call, serializer: Any, coro_fn: Any, *rest: Any, **named: Any) -> Any:
        """A tier whose load raises has loaded nothing."""
        lookup = LOOKUP.get()
        try:
            loaded = await original(coro_fn, *rest, **named)
        except Exception as error:
            missing("a load", repr(error))
            return []
        if lookup is None:
            return loaded
        if lookup.given_up:
            give_back_all(loaded)
            return []
        lookup.loaded.extend(loaded)
        return loaded

    def answer(
        original: Call,
        manager: Any,
        task: Any,
        lookup_id: str,
        cum_chunk_lengths_total: Any,
        tier_expected_chunks: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Give back, once and with its pin, what lies behind the first chunk that is missing.

        The original keeps the pins. To 0.4.5 it raises instead, and the scheduler hears nothing.
        """
        keys_per_chunk = named.get("keys_per_chunk", 1)  # to 0.4.5 it has no such parameter
        if not task.cancelled() and task.exception() is None:
            ended = False
            for tier, expected in zip(task.result(), tier_expected_chunks, strict=False):
                whole = 0 if ended else len(tier) // keys_per_chunk
                behind = tier[whole * keys_per_chunk :]
                del tier[whole * keys_per_chunk :]
                give_back_all([memory for _, memory in behind])
                ended = ended or whole < expected
        return original(task, lookup_id, cum_chunk_lengths_total, tier_expected_chunks, *rest, **named)

    # Memory that nobody gave back

    def collected(original: Call, memory: Any, *rest: Any, **named: Any) -> None:
        """Have a thread free it where a lock is held that freeing takes: the collector may run in who holds it."""
        parent = getattr(memory, "parent_allocator", None)  # none where its own making failed
        if parent is None or not memory.is_valid() or not any(lock.locked() for lock in freeing_takes(parent)):
            original(*rest, **named)
            return
        orphans.append(memory)
        livepatch.count("collected")
        if freeing.acquire(blocking=False):
            try:
                _thread.start_new_thread(free_orphans, ())
            except RuntimeError:  # no more threads, or the process ends: the next one tries again
                freeing.release()

    def free_orphans() -> None:
        while True:
            while orphans:
                with contextlib.suppress(Exception):  # as errors in `__del__`
                    memory = orphans.popleft()
                    memory.parent_allocator.free(memory)
            freeing.release()
            if not orphans or not freeing.acquire(blocking=False):  # one may have come just now
                return

    def send(original: Call, sender: Any, *rest: Any, **named: Any) -> Any:
        """The thread that tells LMCache's controller of chunks goes on after an error."""
        try:
            return original(*rest, **named)
        except Exception as error:
            livepatch.tell("unsent", f"LMCache's controller was not told of some chunks: {error!r}")

    # Stores

    def submit(original: Call, backend: Any, key: Any, memory_obj: Any, *rest: Any, **named: Any) -> Any:
        """To 0.5.4 what finds no room on the disk counts as under way for ever, and what is there already is counted
        again as room that is used: then LMCache is not asked."""
        if hasattr(backend.disk_worker, "try_insert_put_task") or not isinstance(backend.disk_lock, RLOCK):
            return original(key, memory_obj, *rest, **named)
        with backend.disk_lock:  # LMCache's own part takes it again
            if key in backend.dict:
                livepatch.count("stored_already")
                backend.cache_policy.update_on_hit(key, backend.dict)
                return None
            lacking = backend.current_cache_size + memory_obj.get_physical_size() - backend.max_cache_size
            for entry in backend.dict.values() if lacking > 0 else ():
                if entry.can_evict:
                    lacking -= entry.size
                if lacking <= 0:
                    break
            if lacking > 0:
                livepatch.count("no_room")
                return None
            return original(key, memory_obj, *rest, **named)

    def write_file(original: Call, backend: Any, buffer: Any, path: str, *rest: Any, **named: Any) -> None:
        """LMCache's own writes in place, and ignores how many bytes a direct write took."""
        writing = WRITING.get() or Writing()
        writing.begun = True
        try:
            write(path, buffer, is_direct(backend, buffer))
        except OSError as error:
            raise livepatch.deliberate(error)  # noqa: B904 (the same error)
        writing.written = True

    def save(original: Call, backend: Any, key: Any, memory_obj: Any, *rest: Any, **named: Any) -> Any:
        """A write that fails gives back what was taken for it: nobody waits for it, and nobody hears of its error."""
        size, used, writing = memory_obj.get_physical_size(), len(memory_obj.byte_array), Writing()
        try:
            with within(WRITING, writing):
                return original(key, memory_obj, *rest, **named)
        except Exception as error:
            livepatch.tell("failed_writes", f"a chunk could not be written to the disk, and is not stored: {error!r}")
        with backend.disk_lock:
            if key not in backend.dict:
                backend.current_cache_size -= size
                backend.usage -= used if writing.begun else 0
                backend.stats_monitor.update_local_storage_usage(backend.usage)
                if writing.written:
                    with contextlib.suppress(OSError):
                        os.remove(backend._key_to_path(key))
        if not writing.written:
            memory_obj.ref_count_down()
        if backend.exists_in_put_tasks(key):
            backend.disk_worker.remove_put_task(key)
        return None

    return {
        f"{DISK}.__init__": livepatch.after(init),
        f"{DISK}.remove": remove,
        f"{DISK}.touch_cache": touch,
        f"{DISK}.read_file": read_file,
        f"{DISK}.load_bytes_from_disk": load_bytes,
        f"{DISK}.batched_get_blocking": batch,
        f"{DISK}.batched_async_contains": contains,
        f"{DISK}.batched_get_non_blocking": prefetch,
        f"{DISK}.batched_async_load_bytes_from_disk": load_all,
        f"{DISK}.submit_put_task": submit,
        f"{DISK}.write_file": write_file,
        f"{DISK}.async_save_bytes_to_disk": save,
        f"{MEMORY}._setup_metrics": livepatch.after(made),
        f"{MEMORY}.batched_get_non_blocking": from_memory,
        f"{MEMORY}.batched_async_contains": memory_contains,
        f"{MANAGER}:StorageManager.async_lookup_and_prefetch": look_up,
        f"{MANAGER}:StorageManager.prefetch_all_done_callback": answer,
        f"{MANAGER}:AsyncSingleSerializer.run": load_tier,
        f"{OBJECTS}:TensorMemoryObj.__del__": livepatch.lasting(collected),
        f"{SENDER}._drain_and_send": send,
    }


def freeing_takes(allocator: Any) -> Iterator[Any]:
    """The locks that an allocator of memory, and the one inside of it, take to free some. All have `locked`."""
    inside = (getattr(allocator, name, None) for name in ("_allocator", "pin_allocator", "allocator"))
    locks = [getattr(sys.modules.get("lmcache.utils"), "_shared_observability_lock", None)]
    for part in (allocator, *inside):
        locks += [getattr(part, name, None) for name in ("host_mem_lock", "device_mem_lock")]
        locks.append(getattr(getattr(part, "address_manager", None), "_lock", None))
    return (lock for lock in locks if hasattr(lock, "locked"))  # without paging; else some are null contexts


def give_back(memory: Any) -> None:
    """Memory that a load has pinned."""
    memory.unpin()
    memory.ref_count_down()


def give_back_all(loaded: list[Any]) -> None:
    """Memory that a lookup loaded, each chunk with the lookup's pin."""
    for memory in loaded:
        if memory.is_pinned:
            memory.unpin()
        memory.ref_count_down()
