"""Blocks between the paged KV cache and LMCache's chunks, with index operations of torch: one for each transfer.

Whatever the layout and wherever the layers lie, a transfer moves rows of equal length: a whole block where its slots
come before its heads, as in a chunk, else one head of one slot. So all memory from the first layer to the last is seen
as one array of overlapping rows, one beginning at each word, and a transfer indexes it once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

NAME = "multi_layer_block_kv_transfer"
CACHE = "_livepatch_views"
"""Attribute of a tensor of addresses: what was made of them before."""
BLOCKS = (("BS", "NH", "HS"), ("BS", "HS"), ("NH", "BS", "HS"))
"""What is in a block, outermost first. NB blocks, NL layers, TWO keys and values, BS slots, NH heads of HS elements."""


class Layout(NamedTuple):
    """What a format's name says: NL_X_TWO_NB_BS_NH_HS is a tensor a layer, each of [2, NB, BS, NH, HS]."""

    pointers: tuple[str, ...]  # what there is a pointer for each of: nothing, NL, or TWO and NL
    outer: tuple[str, ...]  # the dimensions of a tensor before its blocks'
    heads_first: bool
    fused: bool  # slots of all blocks are one dimension: there is no room between blocks


class PageBufferShapeDesc:
    """Stands in for the compiled one where that is missing; a block stride of 0 is a tight one."""

    __slots__ = ("block_stride_elems", "bs", "element_size", "hs", "kv_size", "nb", "nh", "nl")

    def __init__(self) -> None:
        self.kv_size = self.nl = self.nb = self.bs = self.nh = self.hs = 0
        self.element_size = self.block_stride_elems = 0


def transfer(
    paged_buffer_ptrs_tensor: Any,
    lmcache_objects_ptrs: Sequence[int],
    block_ids: Any,
    device: Any,
    direction: Any,
    shape_desc: Any,
    lmcache_chunk_size: int,
    gpu_kv_format: Any,
    skip_prefix_n_blocks: int,
) -> None:
    """Move blocks as the native operation does, on the current stream of `device`.

    `paged_buffer_ptrs_tensor` is a tensor of addresses of the cache's tensors, `lmcache_objects_ptrs` are addresses of
    chunks of [kv, layers, slots, heads * head size], all in memory that `device` can reach. `block_ids` are the blocks
    of all chunks, one chunk after the other; the first `skip_prefix_n_blocks` of them are left as they are on both
    sides. `direction` is H2D (to the cache) or D2H (to the chunks).

    Raises ValueError, with nothing written, for what it cannot do. Block ids on another device than the CPU are not
    looked at here: that would wait for the device.
    """
    import torch

    to_cache = {"H2D": True, "D2H": False}.get(getattr(direction, "name", ""))
    if to_cache is None:
        raise _error(f"no such direction: {direction!r}")
    device = torch.device(device)
    name = getattr(gpu_kv_format, "name", str(gpu_kv_format))
    apart = int(getattr(shape_desc, "block_stride_elems", 0) or 0)
    form = (name, apart, *(int(getattr(shape_desc, field)) for field in FIELDS))
    chunks = tuple(lmcache_objects_ptrs)
    plan = _tensors(paged_buffer_ptrs_tensor).plan(form, device, chunks, lmcache_chunk_size, skip_prefix_n_blocks)
    ids = torch.as_tensor(block_ids, dtype=torch.int64, device=device)
    if len(ids) != plan.blocks * plan.chunks:
        raise _error(f"{len(ids)} block ids for {plan.chunks} chunks of {plan.blocks} blocks")
    if device.type == "cpu":
        check_ids(ids.tolist(), plan.nb)
    rows, planes, in_block = plan.array
    places = torch.add(planes, ids.reshape(-1, 1, 1, plan.blocks), alpha=plan.stride)
    if in_block is not None:
        places = places[..., None, None] + in_block
    for part, chunk, flat in plan.moves:
        which = places if part is None else places[part]
        if to_cache:
            rows.index_put_((which,), chunk)
        elif flat is not None:
            torch.index_select(rows, 0, which.reshape(-1), out=flat)
        else:
            torch.ops.aten.index.Tensor_out(rows, [which], out=chunk)


def check_ids(ids: Sequence[int], blocks: int) -> None:
    """Raise ValueError where an id is none of `blocks`."""
    if ids and not (min(ids) >= 0 and max(ids) < blocks):
        raise _error(f"block {min(ids) if min(ids) < 0 else max(ids)} is none of the cache's {blocks}")


class Shape(NamedTuple):
    """A cache's shape as the descriptor gives it, checked; `strides` and `row` are bytes."""

    layout: Layout
    kv: int
    nl: int
    nb: int
    bs: int
    nh: int
    hs: int
    block: int  # bytes
    row: int
    strides: dict[str, int]  # of NB, and of NL and TWO where these are in one tensor
    extent: int  # bytes from a tensor's beginning to its end


FIELDS = ("kv_size", "nl", "nb", "bs", "nh", "hs", "element_size")


def _shape_of(name: str, apart: int, kv_size: int, nl: int, nb: int, bs: int, nh: int, hs: int, element: int) -> Shape:
    """Raises ValueError for a format that is unknown, and for a descriptor that is none of it."""
    layout = layout_of(name)
    if layout is None:
        raise _error(f"the format {name} is not known")
    kv = 2 if "TWO" in layout.pointers + layout.outer else 1
    size = {"NL": nl, "NB": nb, "TWO": kv}
    if min(nl, nb, bs, nh, hs, element) < 1 or kv_size != kv:
        given = dict(zip(FIELDS, (kv_size, nl, nb, bs, nh, hs, element), strict=True))
        raise _error(f"a cache of the format {name} cannot have the shape {given}")
    block = stride = bs * nh * hs * element
    strides = {}
    for dimension in reversed(layout.outer):
        strides[dimension] = stride
        stride *= size[dimension]
    apart *= element
    if apart and apart != strides["NB"]:
        if layout.fused or layout.outer[0] != "NB" or apart < strides["NB"]:
            raise _error(f"blocks of the format {name} cannot be {apart} bytes apart, they are {strides['NB']}")
        strides["NB"] = apart
    extent = block + sum((size[dimension] - 1) * strides[dimension] for dimension in layout.outer)
    layout = layout._replace(heads_first=layout.heads_first and nh > 1 and bs > 1)
    row = hs * element if layout.heads_first else block
    return Shape(layout, kv, nl, nb, bs, nh, hs, block, row, strides, extent)


def layout_of(name: str) -> Layout | None:
    """What the format's name says, None for one that is not known."""
    *pointers, tensor = name.split("_X_")
    dimensions = tuple(tensor.replace("NBBS", "NB_BS").replace("_ONE_", "_").split("_"))
    outer = tuple(itertools.takewhile(("NB", "NL", "TWO").__contains__, dimensions))
    inside = dimensions[len(outer) :]
    known = sorted((*pointers, *outer)) in (["NB", "NL"], ["NB", "NL", "TWO"]) and inside in BLOCKS and "NB" in outer
    if not known or pointers not in ([], ["NL"], ["TWO", "NL"]):
        return None
    return Layout(tuple(pointers), outer, inside[0] == "NH", "NBBS" in tensor)


class _Array(NamedTuple):
    """A cache as one array, in words."""

    rows: Any  # rows[i] begins i words after the lowest address
    planes: Any  # [1, kv, layers, 1]: the row at which block 0 of each begins
    in_block: Any  # [slots, heads]: rows from a block's beginning; None where a block is one row


class _Plan(NamedTuple):
    """A transfer without its block ids."""

    array: _Array
    stride: int  # rows from block to block of the cache
    nb: int  # blocks of the cache
    blocks: int  # of a chunk
    chunks: int
    moves: Sequence[tuple[Any, Any, Any]]  # which part of the rows, the chunks' rows, and these as [rows, words]


class _Tensors:
    """The tensors of a cache, by their addresses, and what was made of them for the latest transfers.

    LMCache moves blocks by way of a buffer of its own, so the same addresses of chunks come again.
    """

    def __init__(self, addresses: Any) -> None:
        self.version = _version(addresses)
        self.pointers: list[int] = [int(address) for address in addresses.tolist()]
        self.plan = functools.lru_cache(64)(self._plan)
        # Apart from the plans: a device is waited for when this is made.
        self.array = functools.lru_cache(8)(self._array)

    def _plan(self, form: tuple[Any, ...], device: Any, addresses: tuple[int, ...], slots: int, skip: int) -> _Plan:
        shape = _shape_of(*form)
        if not addresses or not all(addresses):
            raise _error(f"the addresses of chunks are {list(addresses)}")
        blocks = slots // shape.bs
        if slots != blocks * shape.bs or not blocks:
            raise _error(f"chunks of {slots} slots are not made of blocks of {shape.bs}")
        if skip < 0:
            raise _error(f"skip_prefix_n_blocks is {skip}")
        word = math.gcd(16, shape.row, *shape.strides.values(), *self.pointers, *addresses)
        array = self.array(form, device, word)
        moves: list[tuple[Any, Any, Any]] = []
        for first, chunks, skipped in _pieces(addresses, blocks, skip):
            chunk = _chunk_rows(chunks, shape, slots, skipped, word, device)
            whole = len(chunks) == len(addresses) and not skipped
            here = slice(first, first + len(chunks)), slice(None), slice(None), slice(skipped, None)
            flat = chunk.view(-1, chunk.shape[-1]) if chunk.is_contiguous() else None
            moves.append((None if whole else here, chunk, flat))
        return _Plan(array, shape.strides["NB"] // word, shape.nb, blocks, len(addresses), moves)

    def _array(self, form: tuple[Any, ...], device: Any, word: int) -> _Array:
        import torch

        shape, pointers = _shape_of(*form), self.pointers
        expected = math.prod({"NL": shape.nl, "TWO": 2}[dimension] for dimension in shape.layout.pointers)
        if len(pointers) != expected or not all(pointers):
            raise _error(f"{expected} addresses of tensors are needed, not {pointers}")
        lowest, row = min(pointers), shape.row // word
        words = (max(pointers) + shape.extent - lowest) // word
        rows = _memory(lowest, words, word, device, 0, (words - row + 1, row), (1, 1))
        planes = [
            [
                (pointers[_pointer(shape, kv, layer)] - lowest)
                + kv * shape.strides.get("TWO", 0)
                + layer * shape.strides.get("NL", 0)
                for layer in range(shape.nl)
            ]
            for kv in range(shape.kv)
        ]
        in_block = None
        if shape.layout.heads_first:
            slots = torch.arange(shape.bs, device=device)[:, None] * row
            in_block = slots + torch.arange(shape.nh, device=device) * (shape.bs * row)
        return _Array(rows, torch.tensor(planes, device=device)[None, :, :, None] // word, in_block)


def _tensors(addresses: Any) -> _Tensors:
    """What was made of these addresses before; read from a device once, since that waits for the device."""
    kept: _Tensors | None = vars(addresses).get(CACHE)
    if kept is None or kept.version != _version(addresses):
        kept = _Tensors(addresses)
        setattr(addresses, CACHE, kept)
    return kept


def _version(tensor: Any) -> int:
    """How often the tensor was written to; one made in inference mode does not count that."""
    return 0 if tensor.is_inference() else int(tensor._version)


def _pointer(shape: Shape, kv: int, layer: int) -> int:
    if not shape.layout.pointers:
        return 0
    return layer + (kv * shape.nl if "TWO" in shape.layout.pointers else 0)


def _pieces(chunks: Sequence[int], blocks: int, skip: int) -> Iterator[tuple[int, Sequence[int], int]]:
    """What one index operation can do: the first chunk's number, chunks equally far apart, blocks skipped in each."""
    first, skipped = divmod(skip, blocks)
    if skipped and first < len(chunks):
        yield first, chunks[first : first + 1], skipped
        first += 1
    while first < len(chunks):
        end = first + 1
        apart = chunks[end] - chunks[first] if end < len(chunks) else 0
        while apart > 0 and end < len(chunks) and chunks[end] - chunks[end - 1] == apart:
            end += 1
        yield first, chunks[first:end], 0
        first = end


def _chunk_rows(chunks: Sequence[int], shape: Shape, slots: int, skip: int, word: int, device: Any) -> Any:
    """The rows of chunks equally far apart: [chunks, kv, layers, blocks, (slots, heads,) words]."""
    block, row, blocks = shape.block // word, shape.row // word, slots // shape.bs
    apart = (chunks[1] - chunks[0]) // word if len(chunks) > 1 else 0
    size = [len(chunks), shape.kv, shape.nl, blocks - skip]
    stride = [apart, shape.nl * blocks * block, blocks * block, block]
    if shape.layout.heads_first:
        size += [shape.bs, shape.nh]
        stride += [shape.nh * row, row]
    words = (len(chunks) - 1) * apart + shape.kv * shape.nl * blocks * block
    return _memory(chunks[0], words, word, device, skip * block, (*size, row), (*stride, 1))


def _memory(
    address: int, words: int, word: int, device: Any, first: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> Any:
    """So many words of memory as a tensor, never a copy; whoever owns it must keep it."""
    import torch

    dtype = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[word]
    try:
        storage = torch._C._construct_storage_from_data_pointer(address, device, words * word)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, first, size, stride)
    except (AttributeError, RuntimeError) as error:
        raise _error(f"torch {torch.__version__} makes no tensor of memory on {device}: {error}") from error


def _error(message: str) -> ValueError:
    return ValueError(f"{NAME}: {message}; nothing was written")
