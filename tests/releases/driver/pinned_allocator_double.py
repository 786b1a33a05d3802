"""For the benchmark: the release's lazy allocator with a pin call that touches each page, as pinning does."""

from __future__ import annotations

from result import take_stdout

take_stdout()

import ctypes
import os
import time

import pinned_allocator as driver


class Touching(driver.Pins):
    """Registered memory is resident."""

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:
        ctypes.memset(ptr, 0, size)
        return super().cudaHostRegister(ptr, size, flags)


def resident_mib() -> int:
    """Of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") // driver.MIB


def measure(gib: int) -> dict[str, float]:
    """Seconds and MiB (above what the process had before) of a pool of `gib` GiB; then 512 MiB are allocated."""
    before = resident_mib()
    driver.Pins = Touching
    started = time.perf_counter()
    pool = driver.Pool(final=gib << 10, wait=False)
    manager_s = time.perf_counter() - started
    pool.allocator._expand_thread.join()
    settled_s = time.perf_counter() - started
    settled = resident_mib() - before
    held = pool.allocate(64, 8)
    after = resident_mib() - before
    assert len(held) == 8, held
    pool.manager.free(held)
    pool.manager.close()
    return {"manager_s": manager_s, "settled_s": settled_s, "resident_mib": settled, "after_mib": after}
