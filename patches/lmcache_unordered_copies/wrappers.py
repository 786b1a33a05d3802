"""Copies between LMCache's buffers on a device and its host memory keep to the order of the device's stream.

Where LMCache has no compiled operations, a stand-in copies for them, beside the stream on which the blocks are moved
into a buffer and out of it: before they are there, or while they are still to be read. From 0.4.7 on, a store or load
counts as ended before the stream has come to its end, too.

Source: LMCache's own code, run on a GPU (docs/lab-results.md).
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

GPU_OPS = "lmcache.v1.gpu_connector.gpu_ops"


def parts(size: int, offset: int, step: int) -> Iterator[slice]:
    """How `size` bytes at `offset` of LMCache's memory, which is pinned in pieces of `step` bytes, are cut.

    A device's copy must not go beyond a piece.
    """
    begin = 0
    while begin < size:
        end = min(size, begin + step - (offset + begin) % step)
        yield slice(begin, end)
        begin = end


def is_stand_in(name: str) -> bool:
    """Whether an operation is LMCache's own, and written in Python: where the compiled one is there, it is that."""
    names = vars(sys.modules[GPU_OPS])
    ops = names["device_ops"] if "device_ops" in names else names["lmc_ops"]  # from 0.5.4 on an object
    found = getattr(ops, name, None)
    written = isinstance(found, (types.FunctionType, types.MethodType))
    return written and found.__module__.partition(".")[0] == "lmcache"  # mp-block-transfer has one of its own


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target."""

    def is_beside_the_stream(memory: Any, buffer: Any) -> bool:
        """Whether the release would leave the copy to its stand-in, or only an error to it."""
        pieces = sys.modules[GPU_OPS].LazyMemoryAllocator
        return (
            isinstance(memory.parent(), pieces) and memory.raw_tensor is not None and memory.get_size() == buffer.nbytes
        )

    def copy(memory: Any, buffer: Any, to_buffer: bool) -> None:
        """Copy the chunk to the buffer or back, all its bytes, on the current stream."""
        import torch

        step = sys.modules[GPU_OPS].LazyMemoryAllocator.PIN_CHUNK_SIZE
        chunk, flat = (tensor.view(-1).view(torch.uint8) for tensor in (memory.raw_tensor, buffer))
        source, target = (chunk, flat) if to_buffer else (flat, chunk)
        for part in parts(memory.get_size(), memory.meta.address, step):
            target[part].copy_(source[part], non_blocking=True)

    def copied(released: Callable[[], Any], memory: Any, buffer: Any, to_buffer: bool) -> Any:
        """The answer to a copy, which `released` makes as the release does."""
        import torch

        unordered, ends_early = map(is_stand_in, ("lmcache_memcpy_async", "record_completion_on_stream"))
        if not buffer.is_cuda or not (unordered or ends_early):
            return released()
        try:
            if unordered and is_beside_the_stream(memory, buffer):
                copy(memory, buffer, to_buffer)
                livepatch.count("copies")
                answer = None
            else:
                answer = released()
            if ends_early:  # what counts the store or load as ended does not ask the stream
                torch.cuda.current_stream(buffer.device).synchronize()
        except Exception as error:  # the device's or the release's: its own copy would be in no order
            raise livepatch.deliberate(error)  # noqa: B904 (the same error)
        return answer

    def h2d(original: Callable[..., Any], memory_obj: Any, gpu_buffer: Any, *rest: Any, **named: Any) -> Any:
        released = functools.partial(original, memory_obj, gpu_buffer, *rest, **named)
        return copied(released, memory_obj, gpu_buffer, to_buffer=True)

    def d2h(original: Callable[..., Any], gpu_buffer: Any, memory_obj: Any, *rest: Any, **named: Any) -> Any:
        released = functools.partial(original, gpu_buffer, memory_obj, *rest, **named)
        return copied(released, memory_obj, gpu_buffer, to_buffer=False)

    return {f"{GPU_OPS}:lmcache_memcpy_async_h2d": h2d, f"{GPU_OPS}:lmcache_memcpy_async_d2h": d2h}
