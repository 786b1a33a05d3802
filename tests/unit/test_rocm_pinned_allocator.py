"""`rocm-pinned-allocator`: what is counted as pinned, and the runtime that pins.

The allocator is a stand-in: what of a release is concerned is in tests/releases/test_rocm_pinned_allocator.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm_livepatch.patches.rocm_pinned_allocator import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext

MIB = 1 << 20


class Cudart:
    """The CUDA runtime, whose answer is that of the system."""

    answer = 0

    def cudaHostRegister(self, *args: Any) -> int:
        return self.answer


class Allocator:
    """As much of LMCache's lazily grown allocator as pins: releases to 0.5.0 keep the runtime, later ones do not."""

    def __init__(self, cudart: Cudart | None) -> None:
        self._pin_record: list[tuple[int, int]] = []
        self._final_size = 64 * MIB
        if cudart is not None:
            self._cudart = cudart
        self.context = PatchContext("rocm-pinned-allocator", {"STEP_GB": 1.0}, {}, lambda: None)
        self.wrapper = patch.wrappers(self.context)[f"{patch.LAZY[0]}:LazyMemoryAllocator._pin_memory_chunk"]

    def pin(self, offset: int, size: int, error: Exception | None = None) -> None:
        def pin(offset: int, size: int) -> None:
            if error is not None:
                raise error
            runtime = getattr(self, "_cudart", None)
            if runtime is not None:
                runtime.cudaHostRegister(offset, size, 0)
            self._pin_record.append((offset, size))  # to 0.5.0 whatever the answer was

        self.wrapper(pin, self, offset, size)


@pytest.mark.parametrize("cudart", [None, Cudart()])
def test_each_part_is_counted_once(cudart: Cudart | None) -> None:
    allocator = Allocator(cudart)
    for part in range(3):
        allocator.pin(part * 4 * MIB, 4 * MIB)
    assert allocator.context.counters == {"pinned_mib": 12}


def test_the_runtime_is_looked_at_through_one_layer_however_many_parts_there_are() -> None:
    """A layer more with each part would end in a RecursionError, in a pool of a thousand parts."""
    cudart = Cudart()
    allocator = Allocator(cudart)
    for part in range(3):
        allocator.pin(part * MIB, MIB)
    seen: Any = allocator._cudart
    assert seen.cudart is cudart


def test_an_allocator_that_keeps_no_runtime_is_given_none() -> None:
    allocator = Allocator(None)
    allocator.pin(0, MIB)
    assert not hasattr(allocator, "_cudart")


def test_what_the_system_refuses_is_not_recorded_and_what_is_pinned_stays() -> None:
    cudart = Cudart()
    allocator = Allocator(cudart)
    allocator.pin(0, 4 * MIB)
    cudart.answer = 2
    with pytest.raises(patch.PinError, match=r"failed \(2\): asked for 8 MiB more, 4 MiB of 64 MiB are pinned"):
        allocator.pin(4 * MIB, 8 * MIB)
    assert allocator._pin_record == [(0, 4 * MIB)]
    assert allocator.context.counters == {"pinned_mib": 4, "pin_failures": 1}


def test_what_the_release_raises_is_logged_with_what_is_pinned() -> None:
    """Releases after 0.5.0 raise themselves."""
    allocator = Allocator(None)
    allocator.pin(0, 4 * MIB)
    refused = RuntimeError("out of memory")
    with pytest.raises(patch.PinError, match=r"failed \(out of memory\): asked for 8 MiB more, 4 MiB of 64") as raised:
        allocator.pin(4 * MIB, 8 * MIB, refused)
    assert raised.value.__cause__ is refused
    assert allocator._pin_record == [(0, 4 * MIB)]
