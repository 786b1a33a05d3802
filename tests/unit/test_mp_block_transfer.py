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
def test_another_size_than_that_of_dtype_is_said_and_moved(
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
