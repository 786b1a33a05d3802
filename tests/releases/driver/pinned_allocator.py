"""Drive one LMCache release's real lazy allocator through its L1 manager; print what happened as one JSON object.

Only the pin call is stood in for: what the release calls to register host memory with the device (`cudaHostRegister` to
0.5.0, the platform's `pin_memory` after) is answered by `Pins`, which keeps the books and can refuse or wait. Sizes are MiB.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import print_result, raised, take_stdout

take_stdout()

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import native_doubles

native_doubles.install()

import lmcache
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.distributed.config import L1MemoryManagerConfig

MIB = 1 << 20


def first_module(*names: str) -> Any:
    """The first of these modules that the release has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"none of {names}")


LAZY = first_module("lmcache.v1.memory_allocators.lazy_memory_allocator", "lmcache.v1.lazy_memory_allocator")
MANAGER = first_module(
    "lmcache.v1.distributed.memory_manager.l1_memory_manager", "lmcache.v1.distributed.memory_manager"
)


class Pins:
    """The device's books of registered host memory; `limit` MiB may be registered, and `gate` is waited for."""

    is_pin_supported = True

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.limit = 1 << 30
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()
        self.stray = 0

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:
        self.asked.set()
        self.gate.wait()
        if self.mib() + size // MIB > self.limit:
            return 2  # cudaErrorMemoryAllocation
        self.registered[ptr] = size
        return 0

    def cudaHostUnregister(self, ptr: int) -> int:
        self.stray += self.registered.pop(ptr, None) is None
        return 0

    def pin_memory(self, ptr: int, size: int, flags: int = 0) -> bool:
        return self.cudaHostRegister(ptr, size, flags) == 0

    def unpin_memory(self, ptr: int) -> bool:
        return self.cudaHostUnregister(ptr) == 0

    def mib(self) -> int:
        return sum(self.registered.values()) // MIB


def stand_in(pins: Pins) -> None:
    """Put `pins` where the release calls the device."""
    if hasattr(LAZY, "current_device_spec"):
        LAZY.current_device_spec = pins
    elif hasattr(getattr(LAZY, "torch_dev", None), "ext"):
        LAZY.torch_dev.ext = pins
    else:
        getattr(LAZY, "torch_dev", torch.cuda).cudart = lambda: pins


def said(failure: Exception) -> str:
    """What an error of the release's, or of the patch's, says. Raises NotBuilt."""
    raised(failure)
    return f"{type(failure).__name__}: {failure}"


class Pool:
    """A manager with its allocator, and the pins."""

    def __init__(
        self, final: int = 320, init: int = 64, limit: int = 1 << 30, lazy: bool = True, wait: bool = True
    ) -> None:
        self.pins = Pins()
        self.pins.limit = limit
        stand_in(self.pins)
        more = {"shm_name": ""} if "shm_name" in L1MemoryManagerConfig.__dataclass_fields__ else {}
        config = L1MemoryManagerConfig(size_in_bytes=final * MIB, use_lazy=lazy, init_size_in_bytes=init * MIB, **more)
        config.use_lazy = lazy  # from 0.5.1 the configuration itself gives up where the machine cannot pin
        self.manager = MANAGER.L1MemoryManager(config)
        self.allocator = self.manager._allocator
        if lazy and wait:
            self.allocator._expand_thread.join()

    def allocate(self, mib: int, count: int = 1) -> list[Any] | str:
        """The objects, or what came instead of them."""
        layout = MemoryLayoutDesc([torch.Size([mib, MIB])], [torch.uint8])
        try:
            error, objects = self.manager.allocate(layout, count)
        except Exception as failure:
            return said(failure)
        return list(objects) if objects else error.name

    def state(self) -> dict[str, Any]:
        heap = self.allocator.get_address_manager().get_heap_size() // MIB
        return {"pinned": self.pins.mib(), "heap": heap, "usage": [n // MIB for n in self.manager.get_memory_usage()]}


def grows() -> dict[str, Any]:
    """From the start to a full pool, one object of 32 MiB after the other; then back, and closed."""
    pool = Pool()
    states = [pool.state()]
    held: list[Any] = []
    while isinstance(got := pool.allocate(32), list):
        held += got
        states.append(pool.state())
    same = len({obj.tensor.data_ptr() for obj in held})
    parents = all(obj.parent_allocator is pool.allocator for obj in held)
    pool.manager.free(held)
    states.append(pool.state())
    again = pool.allocate(32, 10)
    pool.manager.close()
    return {
        "states": states,
        "objects": len(held),
        "distinct": same,
        "parents": parents,
        "full": got,
        "again": len(again),
        "left": pool.pins.mib(),
        "stray": pool.pins.stray,
        "alive": pool.allocator._expand_thread.is_alive(),
    }


def concurrent() -> dict[str, Any]:
    """Eight threads find no room at one moment."""
    pool = Pool()
    held = pool.allocate(64)
    barrier = threading.Barrier(8)
    got: list[Any] = []

    def one() -> None:
        barrier.wait()
        got.append(pool.allocate(8))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = pool.state()
    pool.manager.free(held)
    pool.manager.close()
    return {"served": sum(isinstance(objects, list) for objects in got), **state}


def often() -> Any:
    """`concurrent` 20 times: what all of them came to, else each."""
    rounds = [concurrent() for _ in range(20)]
    return rounds[0] if all(one == rounds[0] for one in rounds) else rounds


def single() -> dict[str, Any]:
    """Through `allocate`, which makes one object."""
    pool = Pool()
    made = [pool.allocator.allocate(torch.Size([48, MIB]), torch.uint8) for _ in range(3)]
    state = pool.state()
    pool.manager.close()
    return {"made": sum(obj is not None for obj in made), **state}


def refused() -> dict[str, Any]:
    """The device pins 128 MiB and no more, then, later, all that is asked for."""
    pool = Pool(limit=128)
    start = pool.state()
    first = pool.allocate(32, 2)
    second = pool.allocate(96)
    state = pool.state()
    fits = pool.allocate(32)
    pool.pins.limit = 1 << 30
    later = pool.allocate(96)
    usage = pool.state()["usage"]
    pool.manager.close()
    names = ["served" if isinstance(got, list) else got for got in (first, second, fits, later)]
    books = {"left": pool.pins.mib(), "stray": pool.pins.stray}
    return {"start": start, "answers": names, "state": state, "usage": usage, **books}


def refused_at_start() -> str:
    """The initial size cannot be pinned."""
    try:
        pool = Pool(limit=32)
    except Exception as failure:
        return said(failure)
    return f"a pool with {pool.pins.mib()} MiB pinned and a heap of {pool.state()['heap']} MiB"


def too_large() -> dict[str, Any]:
    """What the final size has no room for pins nothing."""
    pool = Pool()
    answers = [pool.allocate(512), pool.allocate(48, 7)]
    state = pool.state()
    pool.manager.close()
    return {"answers": answers, **state}


def closed_meanwhile() -> dict[str, Any]:
    """`close` is called while an expansion waits for the device."""
    pool = Pool()
    held = pool.allocate(64)
    pool.pins.asked.clear()
    pool.pins.gate.clear()
    grower = threading.Thread(target=lambda: pool.allocate(64))
    grower.start()
    waits = pool.pins.asked.wait(5) if pool.state()["heap"] < 320 else False
    closer = threading.Thread(target=pool.manager.close)
    closer.start()
    closer.join(0.2)
    early = waits and not closer.is_alive()
    pool.manager.free(held)
    pool.pins.gate.set()
    grower.join()
    closer.join()
    return {"waited": waits, "closed_early": early, "left": pool.pins.mib(), "stray": pool.pins.stray}


def mixed() -> dict[str, Any]:
    """The manager that is not lazy."""
    pool = Pool(final=64, lazy=False)
    usage = [n // MIB for n in pool.manager.get_memory_usage()]
    got = pool.allocate(16)
    return {"usage": usage, "served": isinstance(got, list), "pinned": pool.pins.mib()}


def others() -> list[str]:
    """Methods of other managers that something has wrapped."""
    found = []
    for name in ("gds_l1_memory_manager.GDSL1MemoryManager", "devdax_l1_memory_manager.DevDaxL1MemoryManager"):
        module, _, cls = name.partition(".")
        try:
            loaded = importlib.import_module(f"lmcache.v1.distributed.memory_manager.{module}")
        except ModuleNotFoundError:
            continue
        found += [f"{cls}.{key}" for key, value in vars(getattr(loaded, cls)).items() if hasattr(value, "__wrapped__")]
    return found


def stands_aside() -> dict[str, Any]:
    """What the patch leans on is gone at one moment: an error of its own."""
    pool = Pool()
    start = pool.state()

    def gone() -> Any:
        del pool.allocator.get_address_manager
        raise AttributeError("it has another name now")

    pool.allocator.get_address_manager = gone
    got = pool.allocate(32)
    pool.allocator._expand_thread.join()
    state = pool.state()
    more = pool.allocate(32, 9)
    pool.manager.close()
    objects = [len(one) for one in (got, more) if isinstance(one, list)]
    return {"start": start, "state": state, "objects": objects, "left": pool.pins.mib(), "stray": pool.pins.stray}


CASES: list[Callable[[], Any]] = [
    grows,
    often,
    single,
    refused,
    refused_at_start,
    too_large,
    closed_meanwhile,
    mixed,
    others,
]


def main() -> None:
    """Run all cases, or the one that the patch does not outlive."""
    result = {case.__name__: case() for case in (CASES if len(sys.argv) == 1 else [stands_aside])}
    print_result(result, lmcache)


if __name__ == "__main__":
    main()
