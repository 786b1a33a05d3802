"""What `mp-block-transfer` says of a cache whose elements are not of the size that DTYPE names. It moves bytes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

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
    assert registered(lambda: "made", None, (), {}) == "made"
    says.reset_mock()  # what it says of the operations that it provides
    shape, to = SimpleNamespace(element_size=size), SimpleNamespace(name="H2D")
    getattr(context.lmc_ops, transfer.NAME)([1], [2], [3], "cpu", to, shape, 16, 0, 0)
    moved.assert_called_once_with([1], [2], [3], "cpu", to, shape, 16, 0, 0)
    assert [call.args[0] for call in says.call_args_list] == (["other_dtype"] if logged else [])
    assert livepatch.counters == {"contexts": 1, "to_cache": 1}


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
    made[f"{wrappers.CONTEXT}:GPUCacheContext.__init__"](lambda: None, None, (), {})
    stage = made[f"{wrappers.CONTEXT}:GPUCacheContext.stage_block_ids"]
    staged: list[list[int]] = []
    args, kwargs = ((), {"block_ids": ids}) if by_name else ((ids,), {})
    cache = SimpleNamespace(num_blocks_=8)
    if refused:
        with pytest.raises(ValueError, match="is none of the cache's 8"):
            stage(lambda block_ids: staged.append(block_ids), cache, args, kwargs)
    else:
        stage(lambda block_ids: staged.append(block_ids), cache, args, kwargs)
    assert staged == ([] if refused else [ids])


@pytest.mark.parametrize(
    ("slots", "heads", "row"), [(1, 4, 64), (2, 1, 32), (2, 4, 16)], ids=["one slot", "one head", "several of both"]
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
