# mypy: disable-error-code="import-not-found"
"""Drive a release's disk backend, LMCache in the engine's process, in a real directory; print what it gives out, as JSON.

The backend, its thread pools, its event loop and the memory that it stages chunks in are the release's own. A chunk is
full of its number. Memory that nobody has filled holds OTHER, as if it were another request's.
"""

from __future__ import annotations

from result import attempted, begin_driver, leave, print_result, until

begin_driver()

import asyncio
import contextlib
import functools
import gc
import importlib
import importlib.util
import itertools
import resource
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import native_doubles

native_doubles.install()

import lmcache
import torch

OTHER = 99
HELD = "the lock is held"
SHAPE, DTYPE = torch.Size([2, 1, 16, 64]), torch.float16
SIZE = 4096
"""Bytes of a chunk: a block of the file system, so that O_DIRECT can be used."""
PATIENCE = 60.0
"""Longest time, in seconds, for what must come about."""
TICK = 0.01
NUMBERS = itertools.count()
"""Of the worlds, so that none finds another's files."""


def found(*names: str) -> Any:
    """The first of these modules that the release has."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(name):
                return importlib.import_module(name)
    raise ModuleNotFoundError(names)


class World:
    """A disk backend with room for so many chunks in memory and on disk."""

    def __init__(self, memory: int = 8, disk: int = 64, direct: bool = False, hot: bool = False) -> None:
        importlib.import_module("lmcache.v1.storage_backend.storage_manager")  # as an engine does, before all backends
        config = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig
        keys = importlib.import_module("lmcache.utils").CacheEngineKey
        self.key = lambda number: keys("model", 1, 0, number, DTYPE)
        self.management = importlib.import_module("lmcache.v1.memory_management")
        allocators = found("lmcache.v1.memory_allocators.tensor_memory_allocator", "lmcache.v1.memory_management")
        whole = torch.empty(memory * SIZE + SIZE, dtype=torch.uint8)
        begin = -whole.data_ptr() % SIZE  # O_DIRECT asks for it
        self.pool = whole[begin : begin + memory * SIZE]
        self.allocator = allocators.TensorMemoryAllocator(self.pool)
        self.folder = Path("disk").absolute() / str(next(NUMBERS))
        given = config.from_defaults(
            local_cpu=hot,
            local_disk=str(self.folder),
            max_local_disk_size=disk * SIZE / 1024**3,
            lmcache_instance_id="one",
            extra_config={"use_odirect": direct},
        )
        importlib.import_module("lmcache.v1.pin_monitor").PinMonitor.GetOrCreate(given)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        cpu = importlib.import_module("lmcache.v1.storage_backend.local_cpu_backend").LocalCPUBackend
        self.cpu = cpu(given, memory_allocator=self.allocator, dst_device="cpu")
        backend = importlib.import_module("lmcache.v1.storage_backend.local_disk_backend").LocalDiskBackend
        self.disk = backend(given, self.loop, self.cpu, dst_device="cpu")

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    def taken(self) -> int:
        """How many chunks of memory are given out."""
        return int(self.allocator.total_allocated_size) // SIZE

    def take(self, number: int) -> list[Any]:
        """Memory that others have."""
        given = [self.allocator.allocate([SHAPE], [DTYPE], self.management.MemoryFormat.KV_2LTD) for _ in range(number)]
        assert None not in given
        return given

    def put(self, number: int) -> None:
        """Give a chunk to be stored, and keep it not."""
        (memory,) = self.take(1)
        memory.tensor.fill_(number)
        try:
            self.disk.submit_put_task(self.key(number), memory)
        finally:
            memory.ref_count_down()

    def store(self, *numbers: int) -> None:
        for number in numbers:
            self.put(number)
            until(lambda number=number: not self.disk.exists_in_put_tasks(self.key(number)))  # type: ignore[misc]
        self.pool.fill_(0)
        self.poison()

    def poison(self) -> None:
        """All memory holds what others left in it."""
        self.pool.view(DTYPE).fill_(OTHER)

    def file(self, number: int) -> Path:
        return Path(self.disk._key_to_path(self.key(number)))

    def has(self, *numbers: int) -> Any:
        """Which of them the backend says that it has; or that it cannot say, since its lock was never given back."""
        if not self.disk.disk_lock.acquire(timeout=0):
            return HELD
        self.disk.disk_lock.release()
        return [self.disk.contains(self.key(number)) for number in numbers]

    def contents(self, memory: Any, release: bool = True) -> Any:
        """What a chunk holds, given back as an engine does after it has copied the chunk."""
        if memory is None:
            return None
        values = sorted(set(memory.tensor.flatten().tolist()))
        if release:
            if memory.is_pinned:
                memory.unpin()
            memory.ref_count_down()
        return int(values[0]) if len(values) == 1 else values

    def prefetch(
        self, *numbers: int, between: Callable[[], object] = lambda: None, tiers: Iterable[Any] | None = None
    ) -> Any:
        """With `enable_async_loading`, by LMCache's own lookup, which pins what it finds: what each chunk then holds.

        `between` its lookup and its load. The scheduler must hear of as many chunks as are loaded, else that is said.
        Of several tiers (the disk alone by default) each is asked for what those before it have not.
        """
        manager = importlib.import_module("lmcache.v1.storage_backend.storage_manager")
        events = importlib.import_module("lmcache.v1.event_manager")
        heard: list[int] = []
        answers = SimpleNamespace(send_response_to_scheduler=lambda lookup, length: heard.append(length))
        events_of_one = events.EventManager()
        add, loading = events_of_one.add_event, []
        events_of_one.add_event = lambda kind, name, future: (loading.append(future), add(kind, name, future))[1]
        own = SimpleNamespace(
            get_active_storage_backends=lambda **_: [(str(tier), tier) for tier in tiers or [self.disk]],
            async_serializer=manager.AsyncSingleSerializer(self.loop),
            event_manager=events_of_one,
            async_lookup_server=answers,
        )
        for name in ("prefetch_single_done_callback", "prefetch_all_done_callback"):
            setattr(own, name, getattr(manager.StorageManager, name).__get__(own))
        keys = [self.key(number) for number in numbers]
        contains = self.disk.batched_async_contains

        async def looked_up(*args: Any) -> Any:
            hits = await contains(*args)
            between()
            return hits

        async def load() -> Any:
            self.disk.batched_async_contains = looked_up
            others = asyncio.all_tasks()
            asked = manager.StorageManager.async_lookup_and_prefetch(
                own, "lookup", keys, list(range(len(keys) + 1)), pin=True
            )
            await asyncio.gather(asked, return_exceptions=True)
            del self.disk.batched_async_contains
            if not loading:  # nobody waits for the loads that were begun
                await asyncio.gather(*asyncio.all_tasks().difference(others), return_exceptions=True)
                return []
            await asyncio.wait(loading)
            await asyncio.sleep(0)  # its callbacks were called
            return loading[0].exception() or loading[0].result()

        loaded = self.run(load())
        if not heard:
            return "the scheduler hears nothing"
        given = [self.contents(memory) for tier in loaded for _, memory in tier]
        return given if heard == [len(given)] else ["heard", heard, *given]

    def get(self, *numbers: int) -> list[Any]:
        """As an engine without `enable_async_loading` does."""
        given = self.disk.batched_get_blocking([self.key(number) for number in numbers])
        return [self.contents(one, release=False) for one in given if self._later(given)]

    def _later(self, given: list[Any]) -> bool:
        self.given = given
        return True

    def give_back(self) -> None:
        for one in self.given:
            if one is not None:
                one.ref_count_down()


def after(world: World, *numbers: int) -> list[Any]:
    """Chunks of memory that are lost, and what the backend says that it has."""
    return [world.taken(), world.has(*numbers)]


def calm(direct: bool = False) -> Any:
    """Nothing goes wrong: the same with the patch and without."""
    world = World(direct=direct)
    world.store(1, 2, 3, 4)
    came = [world.prefetch(1, 2, 3, 4)]
    world.poison()
    came += [world.get(1, 2, 3, 4)]
    world.give_back()
    world.poison()
    came += [world.get(3), world.get(5)]
    sizes = sorted(one.stat().st_size for one in world.folder.iterdir())
    world.disk.remove(world.key(1))
    return [*came, sizes, world.has(1, 2), len(list(world.folder.iterdir()))]


def direct() -> Any:
    return calm(direct=True)


def pool_runs_out() -> Any:
    """A prompt of four chunks, and memory for two of them."""
    world = World(memory=4)
    world.store(1, 2, 3, 4)
    others = world.take(2)
    world.poison()
    came: list[Any] = [world.prefetch(1, 2, 3, 4)]
    for one in others:
        one.ref_count_down()
    world.poison()
    known = after(world, 1, 2, 3, 4)
    return [*came, *known] if HELD in known else [*came, *known, world.prefetch(1, 2, 3, 4)]


def gone_after_its_lookup() -> Any:
    """The third chunk leaves between the lookup and the load."""
    world = World()
    world.store(1, 2, 3, 4)
    came = world.prefetch(1, 2, 3, 4, between=lambda: world.disk.remove(world.key(3)))
    return [came, *after(world, 1, 2, 3, 4)]


def spoiled(how: Callable[[Path], object], load: Callable[[World], Any]) -> Any:
    """The second of three chunks lies spoiled on the disk: what is loaded, and what is lost, and known, after that."""
    world = World()
    world.store(1, 2, 3)
    how(world.file(2))
    came: Any = attempted(lambda: load(world))
    with contextlib.suppress(AttributeError):
        world.give_back()
    return [came.partition(":")[0] if isinstance(came, str) else came, *after(world, 1, 2, 3)]


def shorten(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(SIZE // 2)


def unreadable(file: Path) -> None:
    """No file at all; who opens it has an error that is not FileNotFoundError."""
    file.unlink()
    file.mkdir()


SPOILED = {"short": shorten, "missing": Path.unlink, "unreadable": unreadable}
LOADS: dict[str, Callable[[World], Any]] = {
    "prefetch": lambda world: world.prefetch(1, 2, 3),
    "batch": lambda world: world.get(1, 2, 3),
    "single": lambda world: world.get(2),
}


def more_than_the_pool(seconds: float = 0.0) -> Any:
    """A prompt of four chunks without `enable_async_loading`, memory for three, of which nobody will give any back.

    Each try for memory takes so many seconds by the clock.
    """
    world = World(memory=3)
    world.store(1, 2, 3, 4)
    asked = 0
    allocate, clock = world.allocator.allocate, time.monotonic

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        asked += 1
        return allocate(*args, **kwargs)

    world.allocator.allocate = counted
    came: list[Any] = []
    thread = threading.Thread(target=lambda: came.append(world.get(1, 2, 3, 4)), daemon=True)
    time.monotonic = lambda: clock() + seconds * asked
    thread.start()
    until(lambda: came or asked > 24)
    time.monotonic = clock
    world.allocator.allocate = allocate
    if not came:
        world.allocator.free = lambda memory: None
        allocate = world.allocator.allocate = lambda *args, **kwargs: None
        return "waits, also after twenty tries"
    world.give_back()
    return [*came, *after(world, 1, 2, 3, 4)]


def memory_comes_back() -> Any:
    """Memory is full, and somebody gives a chunk back while the load waits for it."""
    world = World(memory=2)
    world.store(1, 2)
    others = world.take(1)
    world.pool.view(DTYPE).fill_(OTHER)
    asked = threading.Event()
    allocate = world.allocator.allocate

    def noted(*args: Any, **kwargs: Any) -> Any:
        given = allocate(*args, **kwargs)
        if given is None:
            asked.set()
        return given

    world.allocator.allocate = noted
    came: list[Any] = []
    thread = threading.Thread(target=lambda: came.append(world.get(1, 2)), daemon=True)
    thread.start()
    assert asked.wait(PATIENCE)
    others[0].ref_count_down()
    thread.join(PATIENCE)
    world.give_back()
    return [*came, world.taken()]


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """The file system takes half a chunk and refuses the rest, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def disk_is_full(direct: bool = False) -> Any:
    """A write fails; there is room again, and the chunk is stored anew.

    What the backend has, what it lacks and what lies on the disk in between; what is loaded in the end.
    """
    world = World(disk=2, direct=direct)
    failed = threading.Event()
    write = world.disk.write_file

    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        finally:
            failed.set()

    world.disk.write_file = watched
    with small_files():
        world.put(1)
        assert failed.wait(PATIENCE)
        settled(world)
    came = [*after(world, 1), world.disk.exists_in_put_tasks(world.key(1)), len(list(world.folder.iterdir()))]
    world.put(1)
    world.put(2)
    settled(world)
    world.poison()
    return [*came, world.has(1, 2), world.get(1)]


def settled(world: World) -> None:
    """All jobs that were given to the backend's threads have ended, well or not."""

    async def nothing() -> None:
        await world.disk.disk_worker.executor._queue.join()

    world.run(nothing())


def evicted_file_is_gone() -> Any:
    """The disk is full, and what is to leave it is not there: an operator removed it, or another engine."""
    world = World(disk=1)
    world.store(1)
    world.file(1).unlink()
    came: Any = attempted(lambda: world.put(2))
    settled(world)
    world.poison()
    said = came.split(":")[1].strip() if came else "stored"
    return [said, world.has(1, 2), world.disk.exists_in_put_tasks(world.key(2)), world.get(2)]


def full_of_pinned() -> Any:
    """The disk is full of what others load. When they have ended, the chunk is stored after all."""
    world = World(disk=1)
    world.store(1)
    world.disk.pin(world.key(1))
    world.put(2)
    settled(world)
    came: list[Any] = [world.has(1, 2)]
    world.disk.unpin(world.key(1))
    world.put(2)
    settled(world)
    world.poison()
    return [*came, world.has(1, 2), world.get(2)]


def stored_again() -> Any:
    """A disk with room for two chunks; the first is stored three times."""
    world = World(disk=2)
    world.store(1)
    world.store(1)
    world.store(1, 2)
    world.poison()
    return [world.has(1, 2), world.get(1)]


def evicted_after_its_load() -> Any:
    """What was looked up and loaded may leave a full disk."""
    world = World(disk=1)
    world.store(1)
    came = [world.prefetch(1)]
    world.put(2)
    settled(world)
    return [*came, world.has(1, 2)]


def pinned_by_another_lookup() -> Any:
    """Two requests look a chunk up. When one has loaded it, it stays until the other has."""
    world = World(disk=1)
    world.store(1)
    world.run(world.disk.batched_async_contains("other", [world.key(1)], True))
    came = [world.prefetch(1)]
    world.put(2)
    settled(world)
    return [*came, world.has(1, 2)]


def cleared() -> Any:
    """A full disk is cleared, and has room."""
    world = World(disk=2)
    world.store(1, 2)
    world.disk.batched_remove([world.key(1), world.key(2)])
    world.put(3)
    settled(world)
    return world.has(1, 2, 3)


class Compared:
    """A chunk's name, which counts how often it is compared with another."""

    times = 0

    def __init__(self, key: Any) -> None:
        self.key = key

    def __getattr__(self, name: str) -> Any:
        return getattr(self.key, name)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return self is other


def cleared_amid_lookups(number: int = 200) -> Any:
    """Chunks that were looked up are removed before they are loaded: whether each is compared with all, and the rest."""
    world = World(memory=4, disk=2 * number)
    key = world.key
    world.key = functools.cache(lambda one: Compared(key(one)))
    for one in range(number):
        world.put(one)
        until(lambda one=one: not world.disk.exists_in_put_tasks(world.key(one)))  # type: ignore[misc]
    for one in range(number):
        world.disk.contains(world.key(one), pin=True)
    Compared.times = 0
    for one in range(number - 1):
        world.disk.remove(world.key(one))
    few = number * 10 > Compared.times
    world.disk.unpin(world.key(number - 1))
    came = attempted(world.disk.touch_cache)
    return [few, came.partition(":")[0] if came else None]


def layer_by_layer() -> Any:
    """A load by layers cannot say what is missing: it has all, or an error."""
    world = World()
    world.store(1, 2, 3)
    shorten(world.file(2))
    keys = [world.key(number) for number in (1, 2, 3)]
    load = world.disk.batched_get_non_blocking
    came: Any = attempted(lambda: [world.contents(one) for one in world.run(load("fake_lookup_id", keys))])
    return [came if isinstance(came, list) else came.partition(":")[0], *after(world, 1, 2, 3)]


class Tier:
    """A third tier, as another backend than the two would be, that has every chunk, and raises in one of its calls."""

    def __init__(self, asked: bool) -> None:
        self.asked = asked

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        if self.asked:
            raise OSError("a tier that is gone")
        return len(keys)

    async def batched_get_non_blocking(self, *args: Any) -> list[Any]:
        raise OSError("a tier that is gone")


def two_tiers(hot: int = 2) -> World:
    """Chunks 1 to 4: the first two lie in LMCache's memory, the others on the disk."""
    world = World(memory=12, hot=True)
    world.store(3, 4)
    for number in range(1, hot + 1):
        (memory,) = world.take(1)
        memory.tensor.fill_(number)
        world.cpu.submit_put_task(world.key(number), memory)
        memory.ref_count_down()
    return world


def tiers_left(world: World, *kept: int) -> list[Any]:
    """Chunks of memory that are lost, and pins on the chunks that LMCache's memory keeps."""
    memories = [world.cpu.hot_cache[world.key(number)] for number in kept]
    return [world.taken() - len(memories), [(one.meta.ref_count, one.meta.pin_count) for one in memories]]


def tiers() -> Any:
    world = two_tiers()
    came = world.prefetch(1, 2, 3, 4, tiers=[world.cpu, world.disk])
    return [came, *tiers_left(world, 1, 2)]


def many_lookups() -> Any:
    """Asynchronous lookups, one after the other: what is noted of them when they have ended."""
    world = two_tiers()
    for _ in range(3):
        world.prefetch(1, 2, 3, 4, tiers=[world.cpu, world.disk])
    return [len(world.cpu.keys_in_request), len(world.disk.keys_in_request)]


def long_name() -> Any:
    """A model whose name is so long that a chunk's file has as long a name as the file system allows."""
    world = World()
    length = len(world.file(1).name)
    keys = importlib.import_module("lmcache.utils").CacheEngineKey
    world.key = lambda number: keys("model" + "l" * (255 - length), 1, 0, number, DTYPE)
    assert len(world.file(1).name) == 255
    world.put(1)
    settled(world)
    world.poison()
    return [world.has(1), world.get(1)]


def memory_gone_after_its_lookup() -> Any:
    """The second chunk leaves LMCache's memory between the lookup and the load; the third lies on the disk."""
    world = two_tiers()
    asked = []

    def between() -> None:
        asked.append(world.cpu.remove(world.key(2)))

    came = world.prefetch(1, 2, 3, 4, between=between, tiers=[world.cpu, world.disk])
    return [came, *tiers_left(world, 1)]


def left_pinned() -> int:
    """How many chunks stay pinned, until LMCache's own time ends it (300 s), which left its memory by an order.

    From some release on an order to remove a chunk unpins it.
    """
    cpu = importlib.import_module("lmcache.v1.storage_backend.local_cpu_backend").LocalCPUBackend
    return 0 if "unpin" in cpu.remove.__code__.co_names else 1


def tier_raises(asked: bool) -> Any:
    """A third tier raises, where it is asked or where it loads."""
    world = two_tiers()
    came = world.prefetch(1, 2, 3, 4, 5, tiers=[world.cpu, world.disk, Tier(asked)])
    return [came, *tiers_left(world, 1, 2)]


def tier_cannot_be_asked() -> Any:
    return tier_raises(asked=True)


def tier_cannot_load() -> Any:
    return tier_raises(asked=False)


def no_memory_for_others(batch: bool = False, seconds: float = 2.0) -> Any:
    """Memory is full, and somebody other than the disk waits for some: another tier's load, or a store that waits.

    Each try for memory takes so many seconds by the clock.
    """
    world = World(memory=2)
    others = world.take(2)
    tried = 0
    allocate, clock = world.allocator.allocate, time.monotonic

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal tried
        tried += 1
        return allocate(*args, **kwargs)

    world.allocator.allocate = counted
    came: list[Any] = []
    thread = threading.Thread(target=lambda: came.append(world.cpu.allocate(SHAPE, DTYPE)), daemon=True)
    time.monotonic = lambda: clock() + seconds * tried
    thread.start()
    until(lambda: came or tried > 24)
    time.monotonic = clock
    for one in others:
        one.ref_count_down()
    thread.join(PATIENCE)
    return [
        None if came[0] is None and tried < 24 else "waits, also after twenty tries",
        world.taken() - (came != [None]),
    ]


class Collecting:
    """A lock of LMCache's, in whose holder Python's garbage collector runs; who waits for himself is counted."""

    def __init__(self) -> None:
        self.own, self.owner, self.himself = threading.Lock(), 0, 0

    def locked(self) -> bool:
        return self.own.locked()

    def __enter__(self) -> None:
        if self.owner == threading.get_ident():
            self.himself += 1
            raise RuntimeError("waits for itself, for ever")
        self.own.acquire()
        self.owner = threading.get_ident()
        gc.collect()

    def __exit__(self, *rest: object) -> None:
        self.owner = 0
        self.own.release()


def collected(shared: bool = False) -> Any:
    """Memory that nobody gave back is collected in a thread that holds a lock which freeing takes."""
    world = World(memory=4)
    world.take(1)[0].ref_count_down()
    ring: list[Any] = [world.take(1)]
    ring.append(ring)
    gc.disable()
    del ring
    lock = Collecting()
    utils = importlib.import_module("lmcache.utils")
    before = utils._shared_observability_lock
    if shared:
        utils._shared_observability_lock = lock
    else:
        world.allocator.address_manager._lock = lock
    try:
        held = [attempted(lambda: world.take(1)), attempted(lambda: world.take(1))]
        until(lambda: lock.himself or world.taken() == len(held))
    finally:
        utils._shared_observability_lock = before
        gc.enable()
    return [lock.himself, world.taken() - len(held)]


def collected_in_a_metric() -> Any:
    return collected(shared=True)


def collected_beside_another() -> Any:
    """Memory of a pool as engines have it is dropped while another thread updates a metric; then its thread takes some."""
    world = World()
    pool = found("lmcache.v1.memory_allocators.mixed_memory_allocator", "lmcache.v1.memory_management")
    allocator = pool.MixedMemoryAllocator(4 * SIZE)
    shared = importlib.import_module("lmcache.utils")._shared_observability_lock
    dropped, taken = threading.Event(), threading.Event()

    def take() -> Any:
        return allocator.allocate([SHAPE], [DTYPE], world.management.MemoryFormat.KV_2LTD)

    kept = [take()]

    def drop() -> None:
        kept.clear()
        dropped.set()
        take().ref_count_down()
        taken.set()

    with shared:
        threading.Thread(target=drop, daemon=True).start()
        dropped.wait(1.0)  # stock waits for the lock
    came = taken.wait(10.0)
    until(lambda: not came or not allocator.pin_allocator.total_allocated_size)
    return [came]


def controller_not_told() -> Any:
    """LMCache's controller cannot be told of a chunk; of the next it can."""
    sender = importlib.import_module("lmcache.v1.storage_backend.batched_message_sender").BatchedMessageSender
    kind = importlib.import_module("lmcache.v1.cache_controller.message").OpType.EVICT
    told: list[int] = []
    failing = [True]

    def put_msg(message: Any) -> None:
        if failing[0]:
            failing[0] = False
            raise OSError("the controller is gone")
        told.extend(operation.key for operation in message.operations)

    sender._setup_metrics = lambda self: None
    world = World()
    own = sender(
        metadata=SimpleNamespace(worker_id=0),
        config=SimpleNamespace(
            lmcache_instance_id="one", extra_config={}, get_extra_config_value=lambda name, other: other
        ),
        location="LocalDiskBackend",
        lmcache_worker=SimpleNamespace(put_msg=put_msg),
    )
    assert world
    own.add_kv_op(op_type=kind, key=1)
    until(lambda: not failing[0])
    own.add_kv_op(op_type=kind, key=2)
    until(lambda: told or not own.thread.is_alive())
    return told


CASES: dict[str, Callable[[], Any]] = {
    case.__name__: case
    for case in (
        tiers,
        many_lookups,
        long_name,
        memory_gone_after_its_lookup,
        tier_cannot_be_asked,
        tier_cannot_load,
        no_memory_for_others,
        collected,
        collected_in_a_metric,
        collected_beside_another,
        controller_not_told,
        calm,
        direct,
        pool_runs_out,
        gone_after_its_lookup,
        more_than_the_pool,
        memory_comes_back,
        disk_is_full,
        evicted_file_is_gone,
        full_of_pinned,
        stored_again,
        evicted_after_its_load,
        pinned_by_another_lookup,
        cleared,
        cleared_amid_lookups,
        layer_by_layer,
    )
} | {
    f"{how}, {load}": lambda how=how, load=load: spoiled(SPOILED[how], LOADS[load]) for how in SPOILED for load in LOADS
}


def played(wanted: Iterable[str] = ()) -> dict[str, Any]:
    """What each case came to; all cases, or those that are wanted."""
    return {name: attempted(CASES[name]) for name in [*wanted] or CASES}


def main() -> None:
    print_result({"cases": played(sys.argv[1:])}, lmcache)
    leave()


if __name__ == "__main__":
    main()
