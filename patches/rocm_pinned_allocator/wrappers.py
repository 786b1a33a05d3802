"""LMCache's host pool is pinned as allocations need it, its final capacity unchanged.

Source: LMCache#4018 (open). Upstream pins the whole pool in the background from the first second on.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import attached

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

GIB = 1 << 30
LAZY = ("lmcache.v1.lazy_memory_allocator", "lmcache.v1.memory_allocators.lazy_memory_allocator")
MANAGERS = (
    "lmcache.v1.distributed.memory_manager",
    "lmcache.v1.distributed.memory_manager.l1_memory_manager",
)
"""Where the releases have them: each has one of either."""
LOCK = "_livepatch_growth"
"""Attribute of an allocator: the lock that whoever expands it holds."""


class PinError(RuntimeError):
    """Host memory could not be pinned; the message says how much was asked for and how much is pinned."""


class _CheckedCudart:
    """The CUDA runtime whose answer to `cudaHostRegister` is kept: releases to 0.5.0 throw it away."""

    def __init__(self, cudart: Any) -> None:
        self.cudart = cudart
        self.error: Any = None

    def cudaHostRegister(self, *args: Any) -> Any:
        answer = self.cudart.cudaHostRegister(*args)
        self.error = None if int(answer) == 0 else answer
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cudart, name)


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target."""
    step_bytes: float = livepatch.options["STEP_GB"] * GIB

    def lock_of(allocator: Any) -> threading.Lock:
        return attached(allocator, LOCK, threading.Lock)

    # Those whose pool is not whole yet.
    growing: weakref.WeakSet[Any] = weakref.WeakSet()
    # Those that the device has just refused to pin more of.
    refusing: weakref.WeakSet[Any] = weakref.WeakSet()

    def stay(original: Callable[..., Any], allocator: Any, *rest: Any, **named: Any) -> None:
        """The background thread ends at once; `close` still joins it."""
        growing.add(allocator)

    def grow_as_the_release() -> None:
        """The release's own background thread pins the rest, which nobody would grow into otherwise."""
        for allocator in list(growing):
            if allocator._curr_size < allocator._final_size and not allocator._stop_expand.is_set():
                allocator._expand_thread = threading.Thread(target=pin_the_rest, args=(allocator,), daemon=True)
                allocator._expand_thread.start()

    def pin_the_rest(allocator: Any) -> None:
        with lock_of(allocator):  # an expansion under way ends first, and finds on its next turn that it was the last
            pass
        allocator._expand_worker()

    livepatch.on_stand_aside(grow_as_the_release)

    def pin(original: Callable[..., Any], allocator: Any, offset: int, size: int, *rest: Any, **named: Any) -> Any:
        """Pin a part of the buffer (offset and size in bytes), or raise PinError with nothing recorded as pinned."""
        record = allocator._pin_record
        before = len(record)
        pinned = sum(size for _, size in record)
        cudart = vars(allocator).get("_cudart")
        if cudart is not None and not isinstance(cudart, _CheckedCudart):
            cudart = allocator._cudart = _CheckedCudart(cudart)
        cause: Exception | None = None
        try:
            result = original(offset, size, *rest, **named)
            refused = cudart.error if cudart is not None else None
        except Exception as error:
            cause, refused, result = error, error, None
        if refused is None and len(record) > before:
            refusing.discard(allocator)
            livepatch.count("pinned_mib", (sum(size for _, size in record) - pinned) >> 20)
            return result
        del record[before:]
        refusing.add(allocator)
        message = (
            f"pinning host memory failed{f' ({refused})' if refused is not None else ''}: asked for {size >> 20} MiB "
            f"more, {pinned >> 20} MiB of {allocator._final_size >> 20} MiB are pinned (look at `ulimit -l`, the "
            f"container's memory limit and free memory)"
        )
        livepatch.tell("pin_failures", message)
        raise livepatch.deliberate(PinError(message)) from cause

    def expand(allocator: Any, seen: int) -> bool:
        """Pin and commit one step, unless somebody did since the pool had `seen` bytes. False: there is no more."""
        with lock_of(allocator):
            if committed(allocator) != seen:
                return True
            if livepatch.aside:
                return False
            start = allocator._curr_size
            chunk = allocator.PIN_CHUNK_SIZE
            end = min(start + max(step_bytes, chunk), allocator._final_size)
            try:
                # Copies are split at the same boundaries, so that none crosses from one registration to another.
                while allocator._curr_size < end and not allocator._stop_expand.is_set():
                    allocator._pin_memory_chunk(allocator._curr_size, chunk)
                    allocator._curr_size += chunk
            finally:
                gained = allocator._curr_size - start
                if gained:
                    allocator._commit_expansion(gained)
                    livepatch.count("expansions")
            return bool(gained)

    def could_fit(allocator: Any, wanted: int) -> bool:
        uncommitted = allocator._final_size - committed(allocator)
        free = allocator.get_address_manager().get_free_size()
        return bool(uncommitted > 0 and wanted <= free + uncommitted)

    def allocate(
        original: Callable[..., Any], allocator: Any, shapes: Any, dtypes: Any, *rest: Any, **named: Any
    ) -> Any:
        released = functools.partial(original, shapes, dtypes, *rest, **named)
        return found_room(allocator, released, shapes, dtypes)

    def batched_allocate(
        original: Callable[..., Any],
        allocator: Any,
        shapes: Any,
        dtypes: Any,
        batch_size: int,
        *rest: Any,
        **named: Any,
    ) -> Any:
        released = functools.partial(original, shapes, dtypes, batch_size, *rest, **named)
        return found_room(allocator, released, shapes, dtypes, batch_size)

    def found_room(allocator: Any, released: Callable[[], Any], shapes: Any, dtypes: Any, count: int = 1) -> Any:
        """As the release does, growing the pool by steps for as long as it has no room; may raise PinError."""
        while True:
            seen = committed(allocator)
            found = released()
            if found is not None:
                return found
            wanted = bytes_of(shapes, dtypes) * count
            if seen == committed(allocator) and not could_fit(allocator, wanted):
                return None
            if not expand(allocator, seen):
                return None

    def close(original: Callable[..., Any], allocator: Any, *rest: Any, **named: Any) -> Any:
        """Stop an expansion under way, wait for it, then unpin everything as the release does."""
        allocator._stop_expand.set()
        with lock_of(allocator):
            return original(*rest, **named)

    def usage(original: Callable[..., Any], instance: Any, *rest: Any, **named: Any) -> Any:
        """Used and total bytes; the total of a lazily grown pool is its final size.

        Where the device pins no more, it is what is there: else nothing would be evicted, and nothing stored any more.
        """
        used, total = original(*rest, **named)
        allocator = instance._allocator
        if allocator not in refusing and any(
            isinstance(allocator, sys.modules[lazy].LazyMemoryAllocator) for lazy in LAZY if lazy in sys.modules
        ):
            total = max(total, allocator._final_size)
        return used, total

    methods = {"_expand_worker": stay, "_pin_memory_chunk": pin, "close": close}
    methods |= {"allocate": allocate, "batched_allocate": batched_allocate}
    made: dict[str, Callable[..., Any]] = {
        f"{lazy}:LazyMemoryAllocator.{name}": wrapper for lazy in LAZY for name, wrapper in methods.items()
    }
    return made | {f"{manager}:L1MemoryManager.get_memory_usage": usage for manager in MANAGERS}


def committed(allocator: Any) -> int:
    """Bytes that allocations can be made from; `_curr_size` runs ahead of them while an expansion is under way."""
    size: int = allocator.get_address_manager().get_heap_size()
    return size


def bytes_of(shapes: Any, dtypes: Any) -> int:
    """Bytes of one object of one shape and dtype, or of lists of them; what alignment adds is not counted."""
    if not isinstance(dtypes, (list, tuple)):
        shapes, dtypes = [shapes], [dtypes]
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=False):
        size = int(dtype.itemsize)
        for length in shape:
            size *= int(length)
        total += size
    return total
