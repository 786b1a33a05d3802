"""Times of one transfer on CPU memory, by several ways, round by round in one process.

    block_transfer_bench.py TRANSFER.PY ROUNDS TURN_SECONDS

`memcpy` copies as many bytes from one place to another. `rows` is numpy copying what ours does, a `memcpy` a row, the
places computed before; it can where rows lie as in an array. `loop` indexes once a layer (and K and V) and chunk.
`upstream` is LMCache's own Python operation, given tensors (its better form) or addresses (as its MP server calls it).
The ways take turns; a turn is as many calls in a row as take TURN_SECONDS, one at least, and its time is that of one of them.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import importlib.util
import math
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import torch

torch.set_num_threads(1)

# Layers, blocks of the cache, slots of a block, heads, head size, blocks of a chunk, chunks, format.
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, str]] = {
    "MLA, 61 layers, block 64, 1 chunk of 256": (61, 256, 64, 1, 576, 4, 1, "NL_X_NB_BS_HS"),
    "MLA, 61 layers, block 64, 4 chunks of 256": (61, 256, 64, 1, 576, 4, 4, "NL_X_NB_BS_HS"),
    "MLA, 61 layers, block 16, 1 chunk of 256": (61, 1024, 16, 1, 576, 16, 1, "NL_X_NB_BS_HS"),
    "MLA, 61 layers, block 1, 1 chunk of 256": (61, 8192, 1, 1, 576, 256, 1, "NL_X_NB_BS_HS"),
    "K/V, 32 layers, 8 heads, block 16, 1 chunk of 256": (32, 512, 16, 8, 128, 16, 1, "NL_X_TWO_NB_BS_NH_HS"),
    "K/V heads first, 32 layers, 8 heads, block 16, 1 chunk of 256": (
        32,
        512,
        16,
        8,
        128,
        16,
        1,
        "NL_X_TWO_NB_NH_BS_HS",
    ),
    "small: MLA, 61 layers, block 1, 1 chunk of 16": (61, 8192, 1, 1, 576, 16, 1, "NL_X_NB_BS_HS"),
    "small: MLA, 61 layers, block 16 of 64, 1 chunk of 64": (61, 1024, 16, 1, 64, 4, 1, "NL_X_NB_BS_HS"),
    "small: K/V, 61 layers, 1 head of 64, block 16, 4 chunks of 16": (
        61,
        1024,
        16,
        1,
        64,
        1,
        4,
        "NL_X_TWO_NB_BS_NH_HS",
    ),
    "small: K/V, 61 layers, 1 head of 128, block 16, 1 chunk of 64": (
        61,
        1024,
        16,
        1,
        128,
        4,
        1,
        "NL_X_TWO_NB_BS_NH_HS",
    ),
}


class Shape:
    """A cache and its chunks, in bfloat16."""

    def __init__(self, nl: int, nb: int, bs: int, nh: int, hs: int, per: int, chunks: int, kv_format: str) -> None:
        self.kv = 2 if "TWO" in kv_format else 1
        self.heads_first = kv_format.endswith("NH_BS_HS")
        block = (nh, bs, hs) if self.heads_first else (bs, nh, hs)
        size = (nb, bs, hs) if self.kv == 1 else (2, nb, *block)
        self.cache = torch.randint(0, 9, (nl, *size), dtype=torch.int16)
        self.layers = list(self.cache.view(torch.bfloat16).unbind(0))
        self.block = block
        self.per, self.slots = per, per * bs
        self.ids = torch.randperm(nb)[: per * chunks]
        memory = torch.zeros(chunks * self.kv * nl * self.slots * nh * hs, dtype=torch.bfloat16)
        whole = memory.view(chunks, self.kv, nl, self.slots, nh * hs)
        self.chunks = list(whole.unbind(0))
        self.source = torch.ones_like(memory)
        self.memory = memory
        self.format = kv_format
        self.desc = SimpleNamespace(
            kv_size=self.kv, nl=nl, nb=nb, bs=bs, nh=nh, hs=hs, element_size=2, dtype=torch.bfloat16
        )
        self.desc.block_stride_elems = 0
        self.pointers = torch.tensor([layer.data_ptr() for layer in self.layers])

    def loop(self, to_cache: bool) -> None:
        for number, chunk in enumerate(self.chunks):
            ids = self.ids[number * self.per : (number + 1) * self.per]
            for layer, tensor in enumerate(self.layers):
                for kv in range(self.kv):
                    blocks = tensor[kv] if self.kv == 2 else tensor
                    part = chunk[kv, layer].view(self.per, *self.wide)
                    if self.heads_first:
                        if to_cache:
                            blocks.index_copy_(0, ids, part.transpose(1, 2))
                        else:
                            part.copy_(blocks.index_select(0, ids).transpose(1, 2))
                    elif to_cache:
                        blocks.index_copy_(0, ids, part)
                    else:
                        torch.index_select(blocks, 0, ids, out=part)

    def rows(self, to_cache: bool) -> Callable[[], Any]:
        """By numpy, what the loop does."""
        chunk, kv, layer, block = numpy.indices((len(self.chunks), self.kv, len(self.layers), self.per))
        of = self.ids.numpy()[chunk * self.per + block]
        places = ((layer * self.kv + kv) * self.desc.nb + of).reshape(-1)
        row = numpy.dtype((numpy.void, 2 * math.prod(self.block)))
        cache, memory = (tensor.view(torch.int16).numpy().reshape(-1).view(row) for tensor in (self.cache, self.memory))
        if to_cache:
            return lambda: cache.__setitem__(places, memory)
        return lambda: numpy.take(cache, places, out=memory, mode="clip")

    @property
    def wide(self) -> tuple[int, ...]:
        """A block's shape in a chunk."""
        desc = self.desc
        return (desc.bs, desc.hs) if self.kv == 1 else (desc.bs, desc.nh, desc.hs)

    def arguments(self, way: str, to_cache: bool) -> list[Any]:
        directions: Any = SimpleNamespace(H2D=SimpleNamespace(name="H2D"), D2H=SimpleNamespace(name="D2H"))
        kv_format: Any = SimpleNamespace(name=self.format)
        paged: Any = self.pointers
        chunks: Any = [chunk.data_ptr() for chunk in self.chunks]
        if way != "ours":
            from lmcache.lmcache_native import EngineKVFormat, TransferDirection

            directions, kv_format = TransferDirection, getattr(EngineKVFormat, self.format)
        if way == "upstream, tensors":
            paged = self.layers
            chunks = [chunk[0] if self.kv == 1 else chunk for chunk in self.chunks]
        to = directions.H2D if to_cache else directions.D2H
        return [paged, chunks, self.ids, torch.device("cpu"), to, self.desc, self.slots, kv_format, 0]


def ways(shape: Shape, to_cache: bool, ours: Any, upstream: Any) -> dict[str, Callable[[], Any]]:
    """What is measured."""
    made: dict[str, Callable[[], Any]] = {"memcpy": lambda: shape.memory.copy_(shape.source)}
    if not shape.heads_first:
        made["rows"] = shape.rows(to_cache)
    made["loop"] = lambda: shape.loop(to_cache)
    for way, operation in (("ours", ours), ("upstream, tensors", upstream), ("upstream, addresses", upstream)):
        arguments = shape.arguments(way, to_cache)
        made[way] = lambda operation=operation, arguments=arguments: operation(*arguments)  # type: ignore[misc]
    return made


def check(shape: Shape, made: dict[str, Callable[[], Any]], to_cache: bool) -> None:
    """All ways but memcpy do the same."""
    results = []
    for way in [way for way in made if way != "memcpy"]:
        for layer in shape.layers:
            layer.view(torch.int16).copy_(torch.arange(layer.numel(), dtype=torch.int16).view(layer.shape))
        shape.memory.view(torch.int16).copy_(torch.arange(shape.memory.numel(), dtype=torch.int16))
        made[way]()
        results.append(
            [shape.memory.view(torch.int16).clone(), *(layer.view(torch.int16).clone() for layer in shape.layers)]
        )
    for result in results[1:]:
        assert all(map(torch.equal, results[0], result))


def taken(call: Callable[[], Any], times: int) -> float:
    """Seconds that one of so many calls in a row takes."""
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def main() -> None:
    """Measure all shapes."""
    rounds, turn_seconds = int(sys.argv[2]), float(sys.argv[3])
    spec = importlib.util.spec_from_file_location("transfer", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import lmcache
    from lmcache.v1.platform.torch_ops.mp_mem_kernels import multi_layer_block_kv_transfer

    result: dict[str, Any] = {"lmcache": lmcache.__version__, "torch": torch.__version__, "shapes": {}}
    for name, given in SHAPES.items():
        found: dict[str, Any] = {}
        for direction in ("to chunks", "to cache"):
            shape = Shape(*given)
            made = ways(shape, direction == "to cache", module.transfer, multi_layer_block_kv_transfer)
            if shape.memory.nbytes < 20 << 20:
                check(shape, made, direction == "to cache")
            times: dict[str, list[float]] = {way: [] for way in made}
            calls = {way: max(1, round(turn_seconds / taken(call, 3))) for way, call in made.items()}
            for _ in range(rounds):
                for way, call in made.items():
                    times[way].append(taken(call, calls[way]))
            found[direction] = times
            found["bytes"] = shape.memory.nbytes
        result["shapes"][name] = found
    print_result(result)


if __name__ == "__main__":
    main()
