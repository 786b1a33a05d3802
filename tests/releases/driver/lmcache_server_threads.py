# mypy: disable-error-code="import-not-found"
"""Drive the storage manager of a release's server, with its threads, and a real disk behind it; print what comes, as JSON.

Memory, threads, controllers and the adapter of a file system are the release's own. A chunk is full of its number. An
adapter raises, or does not answer, where a case says so, as one does whose store is gone or hangs.
"""

from __future__ import annotations

from result import attempted, begin_driver, leave, print_result, until

begin_driver()

import asyncio
import importlib
import importlib.util
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import native_doubles

native_doubles.install()

from lmcache_server import compiled

compiled()

import lmcache
import torch

SHAPE, DTYPE = torch.Size([2, 1, 16, 64]), torch.float16
SIZE = 4096
PATIENCE = 60.0
DISTRIBUTED = "lmcache.v1.distributed"
NUMBERS = itertools.count()
NOBODY = "nobody answers"
LATER = 130.0
"""Seconds that the clock goes ahead while a load hangs: more than the patch waits by default."""
FIRST = (1).to_bytes(4, "big")
"""The hash of the first chunk."""


def part(name: str) -> Any:
    return importlib.import_module(f"{DISTRIBUTED}.{name}")


def quick() -> None:
    """The evicting threads look every ten milliseconds, not every second."""
    part("storage_controllers.eviction_controller").time = SimpleNamespace(
        sleep=lambda seconds: time.sleep(seconds / 100), monotonic=time.monotonic
    )


class World:
    """A storage manager with memory for so many chunks, and a folder behind it."""

    def __init__(self, memory: int = 16, policy: str = "noop", places: int = 8) -> None:
        importlib.import_module(f"{DISTRIBUTED}.storage_manager")
        quick()
        config, adapters = part("config"), part("l2_adapters.config")
        self.folder = Path("l2").absolute() / str(next(NUMBERS))
        disk = part("l2_adapters.fs_l2_adapter").FSL2AdapterConfig(str(self.folder))
        pool = config.L1MemoryManagerConfig(size_in_bytes=memory * SIZE, use_lazy=False)
        if hasattr(pool, "shm_name"):
            pool.shm_name = ""
        self.manager = part("storage_manager").StorageManager(
            config.StorageManagerConfig(
                l1_manager_config=config.L1ManagerConfig(memory_config=pool),
                eviction_config=config.EvictionConfig(policy, trigger_watermark=0.5, eviction_ratio=0.5),
                l2_adapter_config=adapters.L2AdaptersConfig([disk]),
                prefetch_max_in_flight=places,
            )
        )
        self.l1 = self.manager._l1_manager
        self.prefetching = self.manager._prefetch_controller
        adapters_of = self.prefetching._l2_adapters
        self.adapter = adapters_of[0] if isinstance(adapters_of, list) else next(iter(adapters_of.values()))
        api = part("api")
        self.layout = api.MemoryLayoutDesc([SHAPE], [DTYPE])
        self.key = lambda number, salt="": api.ObjectKey(
            chunk_hash=number.to_bytes(4, "big"), model_name="model", kv_rank=0, cache_salt=salt
        )

    def used(self) -> int:
        """How many chunks of memory are given out."""
        return int(self.l1.get_memory_usage()[0]) // SIZE

    def store(self, *numbers: int, salt: str = "") -> int:
        """Fill chunks. How many there is memory for."""
        keys = [self.key(number, salt) for number in numbers]
        mode = {} if hasattr(self.l1, "finish_write_and_delete") else {"mode": "new"}
        given = self.manager.reserve_write(keys, self.layout, **mode)
        for number, key in zip(numbers, keys, strict=True):
            if key in given:
                given[key].tensor.fill_(number)
        self.manager.finish_write(list(given))
        return len(given)

    def on_disk(self, *numbers: int) -> None:
        """Chunks that lie on the disk alone."""
        assert self.store(*numbers) == len(numbers)
        until(lambda: len(list(self.folder.glob("*.data"))) >= len(numbers))
        until(lambda: all(self.drop(number) for number in numbers))

    def drop(self, number: int) -> bool:
        """Whether a chunk has left the memory."""
        self.l1.delete([self.key(number)])
        return self.l1.get_object_state(self.key(number)) is None

    def ask(self, *numbers: int) -> Any:
        """Begin a lookup, which loads what lies on the disk."""
        keys, api = [self.key(number) for number in numbers], part("api")
        if hasattr(api, "PrefetchTaskSpec"):
            given = [api.PrefetchTaskSpec([api.GroupedObjectKeys(keys, 0, self.layout)])]
        elif hasattr(api, "PrefetchRequestSpec"):
            given = [api.PrefetchRequestSpec(keys, {0: self.layout})]
        else:
            given = [keys, self.layout]
        return self.manager.submit_prefetch_task(*given)

    def hits(self, handle: Any) -> int | None:
        """How many chunks a lookup came to; None where it has not been answered."""
        result = self.manager.query_prefetch_status(handle)
        if result is None or isinstance(result, int):
            return result
        rows = getattr(result, "hit_cells", [result])
        return sum(int(row.popcount()) for row in rows)

    def answered(self, handle: Any) -> int:
        came: list[int] = []

        def asked() -> bool:
            hits = self.hits(handle)
            came.extend([] if hits is None else [hits])
            return bool(came)

        until(asked)
        return came[0]

    def contents(self, *numbers: int) -> list[Any]:
        """What chunks hold that are locked to be read; given back after that."""
        keys = [self.key(number) for number in numbers]
        read = self.l1.unsafe_read(keys)
        held = [sorted(set(read[key][1].tensor.flatten().tolist())) if read[key][1] else None for key in keys]
        self.l1.finish_read(keys)
        return [int(one[0]) if one and len(one) == 1 else one for one in held]

    def loaded(self, *numbers: int) -> list[Any]:
        """A lookup: how many hits, and what they hold."""
        hits = self.answered(self.ask(*numbers))
        return [hits, *self.contents(*numbers[:hits])]

    def in_flight(self) -> int:
        return len(self.prefetching._in_flight_requests)


def broken(name: str) -> tuple[World, list[str]]:
    """A world whose adapter raises, in this call, of the first chunk, once for each entry of the list.

    The call is broken before the adapter is made.
    """
    kind = part("l2_adapters.fs_l2_adapter").FSL2Adapter
    own, errors = getattr(kind, name), []

    def called(adapter: Any, keys: Any, *args: Any, **named: Any) -> Any:
        if errors and keys[0].chunk_hash == FIRST:
            raise OSError(errors.pop())
        return own(adapter, keys, *args, **named)

    setattr(kind, name, called)
    return World(), errors


def calm() -> Any:
    """Nothing goes wrong: chunks are stored, written, loaded and read; the memory is empty in the end."""
    world = World()
    world.on_disk(1, 2, 3)
    came = world.loaded(1, 2, 3, 4)
    until(lambda: all(world.drop(number) for number in (1, 2, 3)))
    return [*came, world.used(), world.in_flight()]


def lookup_raises() -> Any:
    return raises_at("submit_lookup_and_lock_task")


def load_raises() -> Any:
    return raises_at("submit_load_task")


def raises_at(name: str) -> Any:
    """What the first lookup comes to, in which the adapter raises, and the next; places and memory that stay taken."""
    world, errors = broken(name)
    world.on_disk(1, 2, 3)
    errors.append("the store is gone")
    first = world.ask(1, 2)
    until(lambda: not errors)  # to 0.4.4 what is asked for in the same moment is lost with it
    asked = world.loaded(3)
    world.loaded(9)
    came = world.hits(first)
    again = world.loaded(1, 2) if came is not None else None
    for number in (1, 2, 3):
        world.drop(number)
    return [NOBODY if came is None else came, asked, again, world.in_flight(), world.used()]


def store_raises() -> Any:
    """The adapter raises as it is given chunks: whether they stay locked in memory, and whether the next are written."""
    world, errors = broken("submit_store_task")
    errors.append("the store is gone")
    world.store(1)
    until(lambda: not errors)
    world.store(2)
    until(lambda: list(world.folder.glob("*.data")))
    until(lambda: world.drop(2))
    return [world.drop(1), len(list(world.folder.glob("*.data")))]


def load_never_ends() -> Any:
    """One place for loads, and a load that does not end; another lookup behind it; then the load ends after all.

    What the two lookups come to while it hangs, what others' chunks hold when it has ended, and memory that is lost.
    """
    kind = part("l2_adapters.fs_l2_adapter").FSL2Adapter
    own, goes_on = kind._execute_load, threading.Event()
    begun: list[bytes] = []
    ended: list[bytes] = []

    async def slow(adapter: Any, keys: Any, objects: Any, task: Any) -> None:
        begun.append(keys[0].chunk_hash)
        if keys[0].chunk_hash == FIRST:
            await asyncio.get_running_loop().run_in_executor(None, goes_on.wait)  # its own clock is set ahead here
            for one in objects:
                one.raw_data.fill_(77)  # whatever is in that memory now
        await own(adapter, keys, objects, task)
        ended.append(keys[0].chunk_hash)

    kind._execute_load = slow
    world = World(memory=8, places=1)
    world.on_disk(1, 2)
    first = world.ask(1)
    until(lambda: begun)
    second = world.ask(2)
    came: list[Any] = [None, None]

    def both() -> bool:
        for number, handle in enumerate((first, second)):
            came[number] = world.hits(handle) if came[number] is None else came[number]
        return None not in came

    clock = time.monotonic
    limit = clock() + 5.0
    time.monotonic = lambda: clock() + LATER
    until(lambda: both() or clock() > limit)
    time.monotonic = clock
    answers = [NOBODY if one is None else one for one in came]
    others = list(range(10, 18))
    stored = [number for number in others if world.store(number)]
    goes_on.set()
    until(both)
    until(lambda: FIRST in ended)
    world.l1.finish_read([world.key(number) for number, hits in zip((1, 2), came, strict=True) if hits])
    held = [world.l1.reserve_read([world.key(number)]) and world.contents(number)[0] == number for number in stored]
    for number in (1, 2, *stored):
        until(lambda number=number: world.drop(number))  # type: ignore[misc]
    until(lambda: world.used() == 0)
    return [*answers, all(held), world.used()]


def failed_load_is_shown() -> Any:
    """A file is too short: which chunks are shown as filled, to who writes them on to other stores."""
    world = World()
    world.on_disk(1, 2)
    (short,) = [file for file in world.folder.glob("*.data") if "00000002" in file.name]
    short.write_bytes(b"short")
    shown: list[int] = []
    listener = part("storage_controllers.store_controller").StoreListener()
    listener.on_l1_keys_write_finished = lambda keys: shown.extend(
        int.from_bytes(key.chunk_hash, "big") for key in keys
    )
    world.l1.register_listener(listener)
    came = world.loaded(1, 2)
    return [came, shown, world.used()]


def tenants() -> Any:
    """Memory is over its mark, with the policy for tenants: whether the thread lives, and memory comes free."""
    world = World(memory=8, policy="IsolatedLRU")
    thread = (
        world.manager._eviction_controllers[0]._thread
        if hasattr(world.manager, "_eviction_controllers")
        else world.manager._eviction_controller._thread
    )
    for number in range(4):
        world.store(number, salt="a")
        world.store(number, salt="b")
    until(lambda: world.used() <= 4 or not thread.is_alive())
    return [thread.is_alive(), world.used() <= 4]


def evicting_raises() -> Any:
    """One look at memory raises: whether the thread lives, and memory comes free."""
    world = World(memory=8, policy="LRU")
    thread = (
        world.manager._eviction_controllers[0]._thread
        if hasattr(world.manager, "_eviction_controllers")
        else world.manager._eviction_controller._thread
    )
    own, errors = world.l1.get_memory_usage, ["for once"]

    def usage() -> Any:
        if errors:
            raise OSError(errors.pop())
        return own()

    world.l1.get_memory_usage = usage
    until(lambda: not errors)
    for number in range(8):
        world.store(number)
    until(lambda: int(own()[0]) // SIZE <= 4 or not thread.is_alive())
    return [thread.is_alive(), int(own()[0]) // SIZE <= 4]


def one_store_raises() -> Any:
    """Of two stores behind the memory one raises when it is asked how full it is: whether the other is asked."""
    quick()
    module = part("storage_controllers.eviction_controller")
    asked: list[bool] = []

    def gone() -> Any:
        raise OSError("the store is gone")

    class Usage(tuple):  # type: ignore[type-arg]
        def __new__(cls) -> Usage:
            return super().__new__(cls, (-1.0, -1.0))

        usage_fraction = -1.0

    def state(usage: Callable[[], Any]) -> Any:
        return SimpleNamespace(
            adapter_id=0,
            adapter=SimpleNamespace(get_usage=usage),
            eviction_config=SimpleNamespace(trigger_watermark=0.5, eviction_ratio=0.5),
            eviction_policy=SimpleNamespace(support_isolation=False),
        )

    controller = module.L2EvictionController([state(gone), state(lambda: (asked.append(True), Usage())[1])])
    controller.start()
    until(lambda: len(asked) > 1 or not controller._thread.is_alive())
    came = [controller._thread.is_alive(), bool(asked)]
    controller._stop_flag.set()
    return came


CASES: dict[str, Callable[[], Any]] = {
    case.__name__: case
    for case in (
        calm,
        lookup_raises,
        load_raises,
        store_raises,
        load_never_ends,
        failed_load_is_shown,
        evicting_raises,
        one_store_raises,
        tenants,
    )
}


def isolating() -> bool:
    """Whether the release has the policy for tenants."""
    return importlib.util.find_spec(f"{DISTRIBUTED}.eviction_policy.isolated_lru") is not None


def played(wanted: Iterable[str] = ()) -> dict[str, Any]:
    """What each case came to; all cases, or those that are wanted."""
    kind = part("l2_adapters.fs_l2_adapter").FSL2Adapter
    found = {}
    for name in [*wanted] or CASES:
        if name == "tenants" and not isolating():
            continue
        own = dict(vars(kind))
        found[name] = attempted(CASES[name])
        for attribute, value in own.items():
            if callable(value) and vars(kind)[attribute] is not value:
                setattr(kind, attribute, value)
    return found


def main() -> None:
    print_result({"cases": played(sys.argv[1:])}, lmcache)
    leave()


if __name__ == "__main__":
    main()
