"""LMCache's MP server gets the operation that moves blocks where its own operations lack it.

Source: the field (ROCm); LMCache 0.4.3 to 0.4.6 call an operation that only the compiled module has.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from . import completions, transfer

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

CONTEXT = "lmcache.v1.multiprocess.gpu_context"
COMPLETION = "lmcache.v1.multiprocess.native_completion"
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target."""
    dtype: str = livepatch.options["DTYPE"]
    recorded = completions.Completions()

    def operation(
        pointers: Any, chunks: Any, ids: Any, device: Any, to: Any, desc: Any, slots: int, layout: Any, skip: int
    ) -> None:
        transfer.transfer(pointers, chunks, ids, device, to, desc, slots, layout, skip)
        if getattr(device, "type", "") == "cuda" and copies_beside_streams():
            import torch

            # LMCache's stand-in copies what was moved here, or what is to be moved next, without asking the stream.
            torch.cuda.current_stream(device).synchronize()
        livepatch.count("to_cache" if to.name == "H2D" else "to_chunks")
        if dtype != "auto" and int(desc.element_size) != SIZES[dtype]:
            livepatch.say("other_dtype", f"the cache's elements are no {dtype}; its blocks are moved as they are")

    def copies_beside_streams() -> bool:
        """Whether LMCache copies between its buffer and host memory by its stand-in (0.4.4 to 0.4.6)."""
        copy = getattr(sys.modules[CONTEXT].lmc_ops, "lmcache_memcpy_async", None)
        return isinstance(copy, types.FunctionType)

    def provide(ops: Any, **missing: Any) -> None:
        """Give the release's operations what they lack, by the names that the release calls."""
        lacking = [name for name in missing if not hasattr(ops, name)]
        for name in lacking:
            setattr(ops, name, missing[name])
        if lacking:
            livepatch.say(lacking[0], f"{ops.__name__} has no {', '.join(lacking)}: the patch's own do their work")

    def registered(original: Callable[..., Any], context: Any, *rest: Any, **named: Any) -> Any:
        """An engine registers its cache; before that no block is moved."""
        ops = getattr(sys.modules[CONTEXT], "lmc_ops", None)
        if ops is not None:  # 0.4.3 and 0.4.4 have none without a device, and do nothing without one
            provide(ops, **{transfer.NAME: operation, "PageBufferShapeDesc": transfer.PageBufferShapeDesc})
            livepatch.count("contexts" if is_ours() else "native_contexts")
        return original(*rest, **named)

    def is_ours() -> bool:
        return getattr(sys.modules[CONTEXT].lmc_ops, transfer.NAME, None) is operation

    def staged(original: Callable[..., Any], context: Any, block_ids: Any, *rest: Any, **named: Any) -> Any:
        """Block ids on their way to the device: here they can be looked at without waiting for it."""
        if is_ours():
            try:
                transfer.check_ids(block_ids, context.num_blocks_)
            except ValueError as error:
                raise livepatch.deliberate(error)  # noqa: B904 (the same error)
        return original(block_ids, *rest, **named)

    def started(original: Callable[..., Any], dispatcher: Any, *rest: Any, **named: Any) -> Any:
        """The thread that finishes stores and loads, for which it asks the operations."""
        ops = sys.modules[COMPLETION]._lmc_ops
        if not hasattr(ops, "record_completion_on_stream"):
            provide(
                ops,
                record_completion_on_stream=recorded.record_completion_on_stream,
                drain_recorded_completions=recorded.drain_recorded_completions,
            )
        return original(*rest, **named)

    return {
        f"{CONTEXT}:GPUCacheContext.__init__": registered,
        # The operation stays with the release, which has none of its own; so its check does, too.
        f"{CONTEXT}:GPUCacheContext.stage_block_ids": livepatch.lasting(staged),
        f"{COMPLETION}:DeviceHostFuncDispatcher.start": started,
    }
