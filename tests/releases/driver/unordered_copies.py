"""Drive a release's copies between a buffer on a device and a chunk in host memory, on a stream that is behind.

There is no device: what is launched on its stream is done when somebody waits for the stream, and not before; tensors that
are taken to be on the device copy by launching. All else, the copies and what counts them as ended, is the release's, with
its stand-ins for compiled operations.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import all_attempted, print_result, take_stdout

take_stdout()

import ctypes
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import native_doubles
import torch

native_doubles.install()

PIECE, SIZE, BEHIND = 64, 96, 32
"""Bytes that are pinned at once, of a chunk, and behind it in its memory."""


class Stream:
    """A stream that is behind."""

    ptr = cuda_stream = 7

    def __init__(self, *args: Any) -> None:
        self.launched: list[Callable[[], Any]] = []

    def launch(self, work: Callable[[], Any]) -> None:
        self.launched.append(work)

    def synchronize(self) -> None:
        while self.launched:
            self.launched.pop(0)()


STREAM = Stream()
COPIED: list[int] = []
"""How many bytes each copy had that was launched."""


class OnDevice(torch.Tensor):
    """A tensor that is taken to be on the device."""

    is_cuda = True  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            to, of = (one.as_subclass(torch.Tensor) for one in args[:2])
            COPIED.append(of.numel())
            STREAM.launch(lambda: to.copy_(of))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(value: int, *, flat: bool = False) -> torch.Tensor:
    """A buffer in a layout, and of a dtype, as LMCache has them; `value` is in each byte. Eager copies need a flat one."""
    buffer = torch.full((SIZE,), value, dtype=torch.uint8).view(torch.bfloat16)
    return (buffer if flat else buffer.view(2, 3, 8)).as_subclass(OnDevice)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes."""
    return tensor.as_subclass(torch.Tensor).view(-1).view(torch.uint8)


def operations() -> Any:
    return getattr(gpu_ops, "device_ops", None) or gpu_ops.lmc_ops


class Chunk:
    """A chunk in host memory: of memory that is pinned piece by piece, unless it is `eager`. Behind it is somebody's."""

    def __init__(self, value: int, *, eager: bool = False, offset: int = 32) -> None:
        self.raw_tensor: torch.Tensor | None = torch.full((SIZE + BEHIND,), value, dtype=torch.uint8)
        self.raw_tensor[SIZE:] = 255
        self.address = self.raw_tensor.data_ptr()
        self.meta = type("Meta", (), {"address": offset})
        # What the release's own methods read.
        self.parent_allocator = None if eager else object.__new__(gpu_ops.LazyMemoryAllocator)
        self.group_prefix_sum, self._used_size_override = [0, SIZE], None

    @property
    def data_ptr(self) -> int:
        return self.address

    def parent(self) -> Any:
        return TensorMemoryObj.parent(self)

    def get_size(self) -> int:
        return int(TensorMemoryObj.get_size(self))

    def holds(self) -> list[int]:
        assert self.raw_tensor is not None
        assert self.raw_tensor[SIZE:].eq(255).all(), "what is behind the chunk was written over"
        return sorted(set(self.raw_tensor[:SIZE].tolist()))


class Ends:
    """Asks the release when a store or load has ended, as its server does; to 0.4.6 a call that the stream makes is asked,
    and there the compiled module, which 0.4.6 takes it from, is stood in for."""

    def __init__(self) -> None:
        name = "lmcache.v1.multiprocess.native_completion"
        self.module = importlib.import_module(name) if importlib.util.find_spec(name) else None
        if self.module and not hasattr(operations(), "record_completion_on_stream"):
            self.module = None
        self.told: list[Any] = []
        if self.module:
            self.dispatcher = self.module.DeviceHostFuncDispatcher(3600.0)
            self.dispatcher.register("end", self.told.append, int)
            self.dispatcher.start()

    def record(self) -> None:
        if self.module:
            self.module.submit_callback_to_stream(STREAM, "end", 1)
        else:
            STREAM.launch(lambda: self.told.append(1))

    def is_told(self) -> bool:
        if self.module:
            self.dispatcher._drain_once()
        return bool(self.told)

    def come(self) -> None:
        """Until it is told; the stream goes on only where the release waits for it."""
        if not self.is_told():
            STREAM.synchronize()
        assert self.is_told()

    def close(self) -> None:
        if self.module:
            self.dispatcher.stop()


def stored(*, eager: bool = False) -> dict[str, Any]:
    """Blocks are moved into a buffer by what is launched, and from there to a chunk: what it holds when that has ended."""
    ends, buffer, chunk = Ends(), on_device(0, flat=eager), Chunk(1, eager=eager)
    STREAM.launch(lambda: plain(buffer).fill_(7))
    gpu_ops.lmcache_memcpy_async_d2h(buffer, chunk)
    ends.record()
    ends.come()
    at_its_end = chunk.holds()
    STREAM.synchronize()
    ends.close()
    return {"at_its_end": at_its_end, "later": chunk.holds()}


def without_a_runtime() -> dict[str, Any]:
    """As on ROCm: there LMCache's stand-in takes the device's memory for its own."""
    with_runtime(None)
    try:
        return stored()
    finally:
        with_runtime(SimpleNamespace(cudaMemcpy=copy_at_once))


def loaded(*, eager: bool = False) -> dict[str, Any]:
    """A buffer is read by what was launched before it is filled anew, and the chunk given to others when that has ended."""
    ends, buffer, chunk = Ends(), on_device(3, flat=eager), Chunk(5, eager=eager)
    first, second = torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    STREAM.launch(lambda: first.copy_(plain(buffer)))
    gpu_ops.lmcache_memcpy_async_h2d(chunk, buffer)
    STREAM.launch(lambda: second.copy_(plain(buffer)))
    ends.record()
    ends.come()
    assert chunk.raw_tensor is not None
    chunk.raw_tensor[:SIZE] = 9
    STREAM.synchronize()
    ends.close()
    return {"before": sorted(set(first.tolist())), "after": sorted(set(second.tolist()))}


class Context:
    """An engine's registered cache, of one group: how a chunk of it is cut, and the buffer that its chunks go through."""

    lmcache_tokens_per_chunk, max_batch_size, device = 4, 1, "cuda"
    engine_kv_format = gpu_kv_format_ = None

    def __init__(self, value: int) -> None:
        self.buffer = on_device(value)
        attention = SimpleNamespace(is_full_attention=lambda group: True)
        self.kv_layer_groups_manager = SimpleNamespace(
            object_groups=[SimpleNamespace(kernel_group_indices=[0])],
            get_attn_desc=lambda: attention,
            get_sw_size_chunks=lambda group: -1,
            get_subchunk_sw_size_tokens=lambda group: self.lmcache_tokens_per_chunk,
        )

    def calculate_num_blocks(self, tokens: int, group: int) -> int:
        return tokens // 2

    def get_temp_object_group_buffer(self, slot: int, group: int) -> torch.Tensor:
        return self.buffer

    get_temp_kernel_group_buffer = get_temp_object_group_buffer

    def get_kernel_group_kv_pointers(self, group: int) -> torch.Tensor:
        return torch.tensor([4096])

    def get_slots_per_chunk_in_sw(self, group: int) -> int:
        return self.lmcache_tokens_per_chunk

    def get_shape_desc(self, group: int) -> None:
        return None

    get_engine_kv_format = get_shape_desc


def transfer() -> Callable[..., None] | None:
    """What moves the chunks of a store or load, of the module that the server has it from; None to 0.4.6."""
    modules = "lmcache.v1.multiprocess.modules"
    for name in (f"{modules}.lmcache_driven_transfer", f"{modules}.gpu_transfer"):
        if importlib.util.find_spec(modules) and importlib.util.find_spec(name):
            return getattr(importlib.import_module(name), "transfer_kv_per_object_group", None)
    return None


def through(direction: str, context: Context, chunks: list[Chunk], launch: Callable[[int], None]) -> None:
    """Have the release move chunks one after the other, and await that it counts that as ended.

    The blocks of each are moved by what is launched for its first block: that is between the cache and the buffer.
    """
    moved, ends = transfer(), Ends()
    assert moved is not None
    names = moved.__globals__
    directions = names["lmcache_native" if "lmcache_native" in names else "lmc_ops"].TransferDirection
    keys = [one.name for one in inspect.signature(moved).parameters.values() if one.kind is one.KEYWORD_ONLY]
    named = {"transfer_key": "key"} if "transfer_key" in keys else {}
    operation = operations().multi_layer_block_kv_transfer
    operations().multi_layer_block_kv_transfer = lambda *given: launch(int(given[2][0]))
    ids = [torch.arange(2 * len(chunks))]
    try:
        moved(context, ids, chunks, 0, 1, 0, getattr(directions, direction), **named)
    finally:
        operations().multi_layer_block_kv_transfer = operation
    ends.record()
    ends.come()
    ends.close()


def stored_by_lmcache() -> list[list[int]]:
    """Two chunks go through the one buffer: what each holds when the store has ended."""
    context, chunks = Context(0), [Chunk(1), Chunk(1)]
    through("D2H", context, chunks, lambda block: STREAM.launch(lambda: plain(context.buffer).fill_(7 + block)))
    found = [chunk.holds() for chunk in chunks]
    STREAM.synchronize()
    return found


def loaded_by_lmcache() -> list[list[int]]:
    """What comes into the blocks of each chunk; both are given to others when the load has ended."""
    context, chunks = Context(3), [Chunk(5), Chunk(6)]
    cache = torch.zeros(4, SIZE, dtype=torch.uint8)
    through("H2D", context, chunks, lambda block: STREAM.launch(lambda: cache[block].copy_(plain(context.buffer))))
    for chunk in chunks:
        assert chunk.raw_tensor is not None
        chunk.raw_tensor[:SIZE] = 9
    STREAM.synchronize()
    return [sorted(set(cache[block].tolist())) for block in (0, 2)]


def pieces() -> list[list[int]]:
    """How the copies of a chunk are cut, by where it begins: none goes beyond a piece."""
    cut = []
    for offset in (0, 32, 63, 64):
        COPIED.clear()
        gpu_ops.lmcache_memcpy_async_d2h(on_device(1), Chunk(0, offset=offset))
        STREAM.synchronize()
        cut.append(list(COPIED))
    return cut


def errors() -> list[str]:
    """A chunk without memory, and one of another size: the release's own errors."""
    freed, other = Chunk(0), on_device(0)[:1]
    freed.raw_tensor = None
    found = []
    for call in (
        lambda: gpu_ops.lmcache_memcpy_async_d2h(on_device(0), freed),
        lambda: gpu_ops.lmcache_memcpy_async_h2d(freed, on_device(0)),
        lambda: gpu_ops.lmcache_memcpy_async_h2d(memory_obj=Chunk(0), gpu_buffer=other),
    ):
        try:
            call()
            found.append("none")
        except ValueError as error:
            found.append(str(error).partition(";")[0].partition(":")[0])
    return found


def broken(kind: type[Exception]) -> list[Any]:
    """The device refuses a copy: that is an error of the copy, which nothing else makes in its place."""
    copy_, chunk = Stream.launch, Chunk(1)

    def refused(self: Stream, work: Callable[[], Any]) -> None:
        raise kind("the device refuses")

    Stream.launch = refused  # type: ignore[method-assign]
    try:
        gpu_ops.lmcache_memcpy_async_d2h(on_device(7), chunk)
        return ["no error", chunk.holds()]
    except kind as error:
        return [str(error), chunk.holds()]
    finally:
        Stream.launch = copy_  # type: ignore[method-assign]


def on_host() -> list[int]:
    """A buffer that is in CPU memory: the release's own copy."""
    chunk = Chunk(0)
    gpu_ops.lmcache_memcpy_async_d2h(on_device(4).as_subclass(torch.Tensor), chunk)
    return chunk.holds()


def compiled() -> list[int]:
    """With a compiled operation: that is asked, once, with what the release gives it."""
    ops = operations()
    asked: list[Any] = []
    stand_in = ops.lmcache_memcpy_async
    ops.lmcache_memcpy_async = functools.partial(lambda *args: asked.append(args))
    try:
        gpu_ops.lmcache_memcpy_async_d2h(on_device(4), Chunk(0))
    finally:
        ops.lmcache_memcpy_async = stand_in
    return [len(asked), asked[0][2]]


def played() -> dict[str, Any]:
    """What each case came to; nothing where there is no stand-in for the compiled operations."""
    if not hasattr(gpu_ops, "lmc_ops") and not hasattr(gpu_ops, "device_ops"):  # to 0.4.3
        return {}
    by_lmcache = {"stored by LMCache": stored_by_lmcache, "loaded by LMCache": loaded_by_lmcache}
    return all_attempted(
        {
            **(by_lmcache if transfer() else {}),
            "stored": stored,
            "stored, without a runtime": without_a_runtime,
            "stored, eager": functools.partial(stored, eager=True),
            "loaded": loaded,
            "loaded, eager": functools.partial(loaded, eager=True),
            "pieces": pieces,
            "errors": errors,
            "on_host": on_host,
            "broken": functools.partial(broken, RuntimeError),
            "broken, otherwise": functools.partial(broken, TypeError),
            "compiled": compiled,
        }
    )


def main() -> None:
    """Run all cases."""
    import lmcache

    print_result(played() or {"stand_in": None}, lmcache)


def copy_at_once(to: Any, of: Any, size: Any, kind: Any) -> int:
    """The runtime's copy, which does not ask the stream."""
    ctypes.memmove(to, of, size.value)
    return 0


def with_runtime(found: Any) -> None:
    """What LMCache's stand-in finds when it looks for the device's runtime; None as on ROCm, where its name is another."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lmcache.") and "_get_copy_lib" in vars(module):
            module._get_copy_lib = lambda: found  # type: ignore[attr-defined]


torch.cuda.current_stream = lambda device=None: STREAM  # type: ignore[assignment,return-value]
gpu_ops = importlib.import_module("lmcache.v1.gpu_connector.gpu_ops")
TensorMemoryObj = importlib.import_module("lmcache.v1.memory_management").TensorMemoryObj
gpu_ops.LazyMemoryAllocator.PIN_CHUNK_SIZE = PIECE
with_runtime(SimpleNamespace(cudaMemcpy=copy_at_once))

if __name__ == "__main__":
    main()
