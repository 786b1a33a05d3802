"""`mp-block-transfer`, without torch: where blocks and chunks lie, what is refused, and what is logged of DTYPE.

That the bytes arrive is in tests/releases, which have torch.
"""

from __future__ import annotations

import itertools
import operator
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.patches.mp_block_transfer import transfer, wrappers
from vllm_livepatch.sitecustomize.context import PatchContext


@pytest.mark.parametrize(
    ("dtype", "size", "logged"),
    [
        ("auto", 4, False),
        ("float32", 4, False),
        ("float32", 2, True),
        ("bfloat16", 2, False),
        ("bfloat16", 1, True),
        ("float16", 2, False),
        ("float16", 4, True),
    ],
)
def test_another_size_than_that_of_dtype_is_logged_and_moved(
    dtype: str, size: int, logged: bool, mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, says = mocker.patch.object(transfer, "transfer"), mocker.patch.object(PatchContext, "say")
    context: Any = ModuleType(wrappers.CONTEXT)
    context.lmc_ops = ModuleType("lmcache.operations")
    monkeypatch.setitem(sys.modules, wrappers.CONTEXT, context)
    livepatch = PatchContext("mp-block-transfer", {"DTYPE": dtype}, {}, lambda: None)
    registered = wrappers.wrappers(livepatch)[f"{wrappers.CONTEXT}:GPUCacheContext.__init__"]
    assert registered(lambda: "made", None) == "made"
    says.reset_mock()  # what it says of the operations that it provides
    shape, to = SimpleNamespace(element_size=size), SimpleNamespace(name="H2D")
    getattr(context.lmc_ops, transfer.NAME)([1], [2], [3], "cpu", to, shape, 16, 0, 0)
    moved.assert_called_once_with([1], [2], [3], "cpu", to, shape, 16, 0, 0)
    assert [call.args[0] for call in says.call_args_list] == (["other_dtype"] if logged else [])
    assert livepatch.counters == {"contexts": 1, "to_cache": 1}


@pytest.mark.parametrize(
    ("device", "copy", "waits"),
    [("cuda", lambda: None, True), ("cuda", print, False), ("cuda", None, False), ("cpu", lambda: None, False)],
    ids=["stand-in", "compiled", "none", "CPU memory"],
)
@pytest.mark.parametrize("direction", ["D2H", "H2D"])
def test_the_stream_is_waited_for_where_lmcache_copies_beside_it(
    direction: str, device: str, copy: Any, waits: bool, mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the transfer, on the stream on which it was launched."""
    happened = mocker.Mock()
    mocker.patch.object(transfer, "transfer", happened.transfer)
    context: Any = ModuleType(wrappers.CONTEXT)
    context.lmc_ops = ModuleType("lmcache.operations")
    if copy:
        context.lmc_ops.lmcache_memcpy_async = copy
    monkeypatch.setitem(sys.modules, wrappers.CONTEXT, context)
    torch: Any = ModuleType("torch")
    torch.cuda = happened.cuda
    monkeypatch.setitem(sys.modules, "torch", torch)
    livepatch = PatchContext("mp-block-transfer", {"DTYPE": "auto"}, {}, lambda: None)
    wrappers.wrappers(livepatch)[f"{wrappers.CONTEXT}:GPUCacheContext.__init__"](lambda: None, None)
    place, shape, to = SimpleNamespace(type=device), SimpleNamespace(element_size=2), SimpleNamespace(name=direction)
    getattr(context.lmc_ops, transfer.NAME)([1], [2], [3], place, to, shape, 16, 0, 0)
    awaited = [mocker.call.cuda.current_stream(place), mocker.call.cuda.current_stream().synchronize()]
    assert happened.mock_calls == [
        mocker.call.transfer([1], [2], [3], place, to, shape, 16, 0, 0),
        *(awaited if waits else []),
    ]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(("ids", "refused"), [([0, 7], False), ([3, 8], True), ([-1, 3], True), ([], False)])
def test_a_block_that_the_cache_lacks_is_refused_before_it_is_staged(
    by_name: bool, ids: list[int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: Any = ModuleType(wrappers.CONTEXT)
    context.lmc_ops = ModuleType("lmcache.operations")
    monkeypatch.setitem(sys.modules, wrappers.CONTEXT, context)
    livepatch = PatchContext("mp-block-transfer", {"DTYPE": "auto"}, {}, lambda: None)
    made = wrappers.wrappers(livepatch)
    made[f"{wrappers.CONTEXT}:GPUCacheContext.__init__"](lambda: None, None)
    stage = made[f"{wrappers.CONTEXT}:GPUCacheContext.stage_block_ids"]
    staged: list[list[int]] = []
    args, kwargs = ((), {"block_ids": ids}) if by_name else ((ids,), {})
    cache = SimpleNamespace(num_blocks_=8)
    if refused:
        with pytest.raises(ValueError, match="is none of the cache's 8"):
            stage(lambda block_ids: staged.append(block_ids), cache, *args, **kwargs)
    else:
        stage(lambda block_ids: staged.append(block_ids), cache, *args, **kwargs)
    assert staged == ([] if refused else [ids])


@pytest.mark.parametrize(
    ("slots", "heads", "row"),
    [(1, 4, 64), (2, 1, 32), (2, 2, 16), (2, 4, 16)],
    ids=["one slot", "one head", "two of both", "several of both"],
)
def test_a_block_whose_heads_come_first_is_moved_by_rows_of_a_slot_and_head_unless_it_is_one_row(
    slots: int, heads: int, row: int
) -> None:
    shape = transfer._shape_of("NL_X_NB_TWO_NH_BS_HS", 0, 2, 3, 5, slots, heads, 8, 2)
    assert (shape.block, shape.row) == (slots * heads * 8 * 2, row)
    assert shape.strides == {"TWO": shape.block, "NB": 2 * shape.block}
    assert shape.extent == 5 * 2 * shape.block


@pytest.mark.parametrize("wrong", [{"kv_size": 1}, {"nl": 0}, {"nb": 0}, {"bs": 0}, {"nh": 0}, {"hs": 0}])
def test_a_descriptor_that_no_cache_of_the_format_can_have_is_refused(wrong: dict[str, int]) -> None:
    given = dict(zip(transfer.FIELDS, (2, 3, 5, 2, 4, 8, 2), strict=True)) | wrong
    with pytest.raises(ValueError, match="cannot have the shape"):
        transfer._shape_of("NL_X_TWO_NB_BS_NH_HS", 0, *given.values())


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("NB_NL_TWO_BS_NH_HS", ((), ("NB", "NL", "TWO"), False, False)),
        ("NB_NL_TWO_NH_BS_HS", ((), ("NB", "NL", "TWO"), True, False)),
        ("NL_X_TWO_NB_BS_NH_HS", (("NL",), ("TWO", "NB"), False, False)),
        ("NL_X_NB_BS_HS", (("NL",), ("NB",), False, False)),
        ("NL_X_NBBS_ONE_HS", (("NL",), ("NB",), False, True)),
        ("TWO_X_NL_X_NBBS_NH_HS", (("TWO", "NL"), ("NB",), False, True)),
        ("NB_BS_NH_HS", None),  # no layers
        ("NL_X_NB_TWO_HS_BS", None),  # a block that none has
        ("NB_X_NL_BS_HS", None),  # a tensor a block
        ("TWO_X_NL_NB_BS_HS", None),  # two tensors of all layers
    ],
)
def test_a_format_s_name_says_where_a_block_lies(name: str, layout: tuple[Any, ...] | None) -> None:
    """One that says something else is refused: its blocks would be looked for where others lie."""
    assert transfer.layout_of(name) == layout


ROOM = {"kv_size": 2, "nl": 3, "nb": 5, "bs": 2, "nh": 4, "hs": 8, "element_size": 2}
BLOCK = 2 * 4 * 8 * 2
"""Bytes of one."""


def room(name: str, apart: int) -> transfer.Shape:
    return transfer._shape_of(name, apart // 2, *ROOM.values())


@pytest.mark.parametrize(
    ("name", "apart", "strides"),
    [
        ("NB_NL_TWO_BS_NH_HS", 0, {"TWO": BLOCK, "NL": 2 * BLOCK, "NB": 6 * BLOCK}),
        ("NB_NL_TWO_BS_NH_HS", 6 * BLOCK, {"TWO": BLOCK, "NL": 2 * BLOCK, "NB": 6 * BLOCK}),
        ("NB_NL_TWO_BS_NH_HS", 6 * BLOCK + 16, {"TWO": BLOCK, "NL": 2 * BLOCK, "NB": 6 * BLOCK + 16}),
        ("TWO_X_NL_X_NB_BS_NH_HS", BLOCK + 16, {"NB": BLOCK + 16}),
        ("TWO_X_NL_X_NBBS_NH_HS", BLOCK, {"NB": BLOCK}),
        ("NL_X_TWO_NB_BS_NH_HS", BLOCK, {"NB": BLOCK, "TWO": 5 * BLOCK}),
    ],
)
def test_blocks_lie_as_far_apart_as_the_descriptor_says(name: str, apart: int, strides: dict[str, int]) -> None:
    shape = room(name, apart)
    assert shape.strides == strides
    last = {"NB": 4, "NL": 2, "TWO": 1}
    assert shape.extent == BLOCK + sum(last[dimension] * stride for dimension, stride in strides.items())


@pytest.mark.parametrize(
    ("name", "apart"),
    [
        ("NB_NL_TWO_BS_NH_HS", 6 * BLOCK - 16),  # they would overlap
        ("TWO_X_NL_X_NBBS_NH_HS", BLOCK + 16),  # the format's name has no room for it
        ("NL_X_TWO_NB_BS_NH_HS", BLOCK + 16),
    ],
)
def test_blocks_that_cannot_lie_so_far_apart_are_refused(name: str, apart: int) -> None:
    with pytest.raises(ValueError, match=f"cannot be {apart} bytes apart"):
        room(name, apart)


@pytest.mark.parametrize(
    ("chunks", "skip", "pieces"),
    [
        ([10, 20, 30], 0, [(0, [10, 20, 30], 0)]),
        ([10, 20, 30], 1, [(0, [10], 1), (1, [20, 30], 0)]),
        ([10, 20, 30], 2, [(1, [20, 30], 0)]),
        ([10, 20, 30], 5, [(2, [30], 1)]),
        ([10, 20, 30], 6, []),
        ([10, 20, 30], 7, []),
        ([10, 20, 25, 30, 50], 0, [(0, [10, 20], 0), (2, [25, 30], 0), (4, [50], 0)]),
        ([30, 20, 10], 0, [(0, [30], 0), (1, [20], 0), (2, [10], 0)]),
        ([10, 10], 0, [(0, [10], 0), (1, [10], 0)]),
    ],
)
def test_chunks_equally_far_apart_are_moved_at_once_but_for_what_is_skipped(
    chunks: list[int], skip: int, pieces: list[tuple[int, list[int], int]]
) -> None:
    assert list(transfer._pieces(chunks, 2, skip)) == pieces


class Rows(NamedTuple):
    """What a tensor of memory would be made of."""

    address: int
    words: int
    word: int
    device: str
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    def is_contiguous(self) -> bool:
        return False

    def begin(self) -> list[int]:
        """The addresses of its rows, in order."""
        places = itertools.product(*(range(size) for size in self.size[:-1]))
        within = [sum(map(operator.mul, place, self.stride)) for place in places]
        return [self.address + (self.first + words) * self.word for words in within]


@pytest.mark.parametrize("name", ["NL_X_TWO_NB_BS_NH_HS", "NL_X_TWO_NB_NH_BS_HS"])
@pytest.mark.parametrize(("chunks", "skip"), [([4096, 8192, 12288], 0), ([4096, 8192], 0), ([4096], 0), ([4096], 2)])
def test_the_rows_of_chunks_lie_where_lmcache_has_them(
    name: str, chunks: list[int], skip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk is [keys and values, layers, slots, heads * head size], whatever the cache's layout is."""
    monkeypatch.setattr(transfer, "_memory", Rows)
    shape, slots, head = room(name, 0), 6, 8 * 2
    rows: Rows = transfer._chunk_rows(chunks, shape, slots, skip, 16, "cpu")
    heads = shape.layout.heads_first
    assert rows.begin() == [
        chunk + (((kv * 3 + layer) * slots + block * 2 + slot) * 4 + number) * head
        for chunk in chunks
        for kv in range(2)
        for layer in range(3)
        for block in range(skip, 3)
        for slot in range(2 if heads else 1)
        for number in range(4 if heads else 1)
    ]
    assert (rows.size[-1] * 16, rows.stride[-1]) == (head if heads else BLOCK, 1)
    assert rows.address + rows.words * 16 == chunks[-1] + 2 * 3 * slots * 4 * head  # nothing behind it is asked for


class Addresses:
    """A tensor of addresses, of which LMCache writes none."""

    def __init__(self, *addresses: int) -> None:
        self.addresses = addresses

    def tolist(self) -> list[int]:
        return list(self.addresses)

    def is_inference(self) -> bool:
        return True


def planned(addresses: tuple[int, ...], slots: int, skip: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(transfer, "_memory", Rows)
    tensors: Any = transfer._tensors(Addresses(1 << 20, 2 << 20, 3 << 20))
    tensors.array = lambda form, device, word: word
    return tensors.plan(("NL_X_TWO_NB_BS_NH_HS", 0, *ROOM.values()), "cpu", addresses, slots, skip)


@pytest.mark.parametrize(
    ("addresses", "slots", "skip", "why"),
    [
        ((), 4, 0, "the addresses of chunks are"),
        ((4096, 0), 4, 0, "the addresses of chunks are"),
        ((4096,), 5, 0, "chunks of 5 slots are not made of blocks of 2"),
        ((4096,), 0, 0, "chunks of 0 slots are not made of blocks of 2"),
        ((4096,), 4, -1, "skip_prefix_n_blocks is -1"),
    ],
)
def test_chunks_that_cannot_be_moved_are_refused(
    addresses: tuple[int, ...], slots: int, skip: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=f"{why}.*nothing was written"):
        planned(addresses, slots, skip, monkeypatch)


def test_each_chunk_is_given_its_own_block_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is skipped is a part of the first chunk alone."""
    every = slice(None)
    (whole,) = planned((4096, 8192), 4, 0, monkeypatch).moves
    assert whole[0] is None
    part, rest = planned((4096, 8192), 4, 1, monkeypatch).moves
    assert (part[0], rest[0]) == (
        (slice(0, 1), every, every, slice(1, None)),
        (slice(1, 2), every, every, slice(0, None)),
    )
    plan = planned((4096, 8192), 4, 0, monkeypatch)
    assert (plan.stride * plan.array, plan.nb, plan.blocks, plan.chunks) == (BLOCK, 5, 2, 2)


@pytest.mark.parametrize(("addresses", "word"), [((4096, 8192), 16), ((4096, 8200), 8), ((4098,), 2)])
def test_memory_is_moved_in_the_largest_words_that_all_of_it_is_made_of(
    addresses: tuple[int, ...], word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned(addresses, 4, 0, monkeypatch).array == word


def test_addresses_are_read_again_when_they_were_written_to() -> None:
    """Reading them waits for the device; keeping them would move blocks of a cache that is gone."""
    addresses: Any = Addresses(1, 2)
    first = transfer._tensors(addresses)
    assert transfer._tensors(addresses) is first
    addresses.is_inference = lambda: False
    addresses._version, addresses.addresses = 3, (5, 6)
    second = transfer._tensors(addresses)
    assert (first.pointers, second.pointers) == ([1, 2], [5, 6])
    assert transfer._tensors(addresses) is second


@pytest.mark.parametrize(("ids", "named"), [([3, 8], 8), ([0, 9, 8], 9), ([-1, 9], -1)])
def test_the_block_that_the_cache_lacks_is_named(ids: list[int], named: int) -> None:
    with pytest.raises(ValueError, match=f"block {named} is none of the cache's 8"):
        transfer.check_ids(ids, 8)


def test_a_descriptor_says_nothing_until_it_is_filled() -> None:
    """A block stride of 0 is a tight one."""
    descriptor = transfer.PageBufferShapeDesc()
    assert {getattr(descriptor, name) for name in descriptor.__slots__} == {0}


def test_a_cache_without_keys_apart_from_values_has_one_of_both() -> None:
    shape = transfer._shape_of("NL_X_NB_BS_HS", 0, *{**ROOM, "kv_size": 1, "nh": 1}.values())
    assert (shape.kv, shape.nl, shape.strides) == (1, 3, {"NB": 2 * 8 * 2})


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("NB_NL_TWO_BS_NH_HS", [[0, 0, 0], [0, 0, 0]]),
        ("NL_X_TWO_NB_BS_NH_HS", [[0, 1, 2], [0, 1, 2]]),
        ("TWO_X_NL_X_NBBS_NH_HS", [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_which_of_a_cache_s_tensors_has_a_layer_s_keys_or_values(name: str, places: list[list[int]]) -> None:
    shape = room(name, 0)
    assert [[transfer._pointer(shape, kv, layer) for layer in range(3)] for kv in range(2)] == places


class Numbers:
    """A tensor of [keys and values, layers]."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def __getitem__(self, which: Any) -> Numbers:
        assert which == (None, slice(None), slice(None), None)
        return self

    def __floordiv__(self, word: int) -> list[list[int]]:
        return [[number // word for number in row] for row in self.rows]


def arranged(name: str, addresses: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache as one array, in words of 16 bytes."""
    monkeypatch.setattr(transfer, "_memory", Rows)
    torch: Any = SimpleNamespace(tensor=lambda planes, device: Numbers(planes))
    monkeypatch.setitem(sys.modules, "torch", torch)
    return transfer._Tensors(Addresses(*addresses)).array((name, 0, *ROOM.values()), "cpu", 16)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "addresses", "begin"),
    [
        ("NB_NL_TWO_BS_NH_HS", [MIB], [[0, 2 * BLOCK, 4 * BLOCK], [BLOCK, 3 * BLOCK, 5 * BLOCK]]),
        (
            "NL_X_TWO_NB_BS_NH_HS",
            [3 * MIB, MIB, 2 * MIB],
            [[2 * MIB, 0, MIB], [2 * MIB + 5 * BLOCK, 5 * BLOCK, MIB + 5 * BLOCK]],
        ),
        (
            "TWO_X_NL_X_NBBS_NH_HS",
            [MIB, 2 * MIB, 3 * MIB, 6 * MIB, 5 * MIB, 4 * MIB],
            [[0, MIB, 2 * MIB], [5 * MIB, 4 * MIB, 3 * MIB]],
        ),
    ],
)
def test_a_cache_is_seen_from_its_first_byte_to_its_last(
    name: str, addresses: list[int], begin: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no further: a block id that is none of its own must not reach what lies behind it."""
    array = arranged(name, addresses, monkeypatch)
    assert array.planes == [[number // 16 for number in row] for row in begin]
    rows, row = array.rows, BLOCK // 16
    assert (rows.address, rows.first, rows.stride) == (min(addresses), 0, (1, 1))
    assert rows.address + rows.words * 16 == max(addresses) + room(name, 0).extent
    assert rows.size == (rows.words - row + 1, row)
    assert array.in_block is None


@pytest.mark.parametrize(
    ("name", "addresses"),
    [
        ("NL_X_TWO_NB_BS_NH_HS", [MIB, 2 * MIB]),
        ("NL_X_TWO_NB_BS_NH_HS", [MIB, 2 * MIB, 0]),
        ("NB_NL_TWO_BS_NH_HS", [MIB, 2 * MIB]),
        ("TWO_X_NL_X_NBBS_NH_HS", [MIB, 2 * MIB, 3 * MIB]),
    ],
)
def test_a_cache_of_other_tensors_than_its_format_has_is_refused(
    name: str, addresses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="addresses of tensors are needed"):
        arranged(name, addresses, monkeypatch)
