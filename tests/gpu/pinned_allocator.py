"""rocm-pinned-allocator with a real device: which memory of LMCache's host pool is registered with it, and when.

    python tests/gpu/pinned_allocator.py

The cases are those of the release test (tests/releases/driver/pinned_allocator.py), on the LMCache that the interpreter
has. There the pin call is stood in for; here it is the runtime's, and so are the answers: what is pinned is asked of the
device, address by address. A pin that fails is one of memory that was registered before. `run.py` makes the bundle.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "releases" / "driver"))

import cupy
import pinned_allocator as driver
import torch
from pinned_allocator import MIB
from result import all_attempted, print_result

runtime = cupy.cuda.runtime


class Device:
    """In the place of the driver's books: the device's own."""

    def __init__(self) -> None:
        self.limit = 1 << 30
        self.stray = 0
        self.begin, self.size = 0, 0

    def mib(self) -> int:
        """How much of the pool the device takes for pinned, looked at every MiB."""
        ends = range(self.begin, self.begin + self.size, MIB)
        return sum(runtime.pointerGetAttributes(address).type == runtime.memoryTypeHost for address in ends)


class Pool(driver.Pool):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        buffer = self.allocator._buffer
        self.pins.begin, self.pins.size = buffer.data_ptr(), buffer.numel() * buffer.element_size()


def grows() -> Any:
    """One object of 32 MiB after the other; then all back, and the pool closed."""
    return driver.grows()


def often() -> Any:
    """Eight threads find no room at one moment, 20 times."""
    return driver.often()


def copies() -> dict[str, Any]:
    """What was handed out is pinned, and takes what a stream brings from the device, and gives it back."""
    pool = Pool()
    held, wrong, unpinned = [], 0, 0
    stream = torch.cuda.Stream()
    for _ in range(8):
        (got,) = pool.allocate(32)
        held.append(got)
        host = got.tensor.view(-1)
        unpinned += not host.is_pinned()
        there = torch.randint(0, 256, (host.numel(),), dtype=torch.uint8, device="cuda")
        back = torch.empty_like(there)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            host.copy_(there, non_blocking=True)
            back.copy_(host, non_blocking=True)
        stream.synchronize()
        wrong += not torch.equal(there, back) or not torch.equal(there.cpu(), host)
    state = pool.state()
    pool.manager.free(held)
    pool.manager.close()
    return {"wrong": wrong, "unpinned": unpinned, **state, "left": pool.pins.mib()}


def refused() -> dict[str, Any]:
    """The device does not pin the part of the pool from 128 MiB on; later it does."""
    pool = Pool()
    taken = pool.pins.begin + 128 * MIB
    already = runtime.pointerGetAttributes(taken).type == runtime.memoryTypeHost
    if already:  # stock has pinned all of it by now
        state = pool.state()
        pool.manager.close()
        return {"already": True, "state": state}
    runtime.hostRegister(taken, MIB, 0)
    first, second, fits = pool.allocate(32, 2), pool.allocate(96), pool.allocate(32)
    state = pool.state()
    runtime.hostUnregister(taken)
    later = pool.allocate(96)
    pool.manager.close()
    names = ["served" if isinstance(got, list) else got for got in (first, second, fits, later)]
    return {"already": False, "answers": names, "state": state, "left": pool.pins.mib()}


def main() -> None:
    driver.Pins, driver.Pool = Device, Pool
    driver.stand_in = lambda pins: None
    cases = {case.__name__: case for case in (grows, often, copies, refused)}
    print_result(all_attempted(cases), driver.lmcache)


if __name__ == "__main__":
    main()
