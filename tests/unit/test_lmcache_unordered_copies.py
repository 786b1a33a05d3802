"""`lmcache-unordered-copies`, without torch: where a copy is cut, and when the release's own is left alone.

That the bytes arrive, in which order, is in tests/releases, which have torch.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_mock import MockerFixture
from vllm_livepatch.patches.lmcache_unordered_copies import wrappers
from vllm_livepatch.sitecustomize.context import PatchContext


@given(size=st.integers(0, 300), offset=st.integers(0, 300), step=st.integers(1, 64))
def test_a_copy_is_cut_where_a_pinned_piece_ends_and_nowhere_else(size: int, offset: int, step: int) -> None:
    cut = list(wrappers.parts(size, offset, step))
    assert [byte for part in cut for byte in range(part.start, part.stop)] == list(range(size))
    for part in cut:
        assert (offset + part.start) // step == (offset + part.stop - 1) // step, "it goes beyond a piece"
    assert all((offset + part.start) % step == 0 for part in cut[1:]), "it is cut within a piece"


def stand_in() -> None:
    """What LMCache has in the place of a compiled operation."""


def ours() -> None:
    """What another patch has in the place of one."""


class Operations:
    """LMCache's operations from 0.5.4 on."""

    def lmcache_memcpy_async(self) -> None: ...


stand_in.__module__ = Operations.lmcache_memcpy_async.__module__ = "lmcache.operations"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"lmc_ops": SimpleNamespace(lmcache_memcpy_async=stand_in)}, True),
        ({"lmc_ops": SimpleNamespace(lmcache_memcpy_async=print)}, False),
        ({"lmc_ops": SimpleNamespace(lmcache_memcpy_async=ours)}, False),
        ({"lmc_ops": SimpleNamespace()}, False),
        ({"device_ops": Operations()}, True),
        ({"device_ops": SimpleNamespace(lmcache_memcpy_async=print), "lmc_ops": Operations()}, False),
    ],
    ids=["stand-in", "compiled", "another patch's", "none", "stand-in of an object", "compiled, of an object"],
)
def test_a_stand_in_is_what_is_written_in_python(
    names: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType(wrappers.GPU_OPS)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, wrappers.GPU_OPS, module)
    assert wrappers.is_stand_in("lmcache_memcpy_async") is expected


class Pieces:
    """LMCache's allocator of memory that is pinned piece by piece."""

    PIN_CHUNK_SIZE = 64


@pytest.fixture
def device(mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """LMCache's module with its stand-in, and torch: what is asked of the device's stream is noted."""
    module: Any = ModuleType(wrappers.GPU_OPS)
    module.lmc_ops, module.LazyMemoryAllocator = SimpleNamespace(lmcache_memcpy_async=stand_in), Pieces
    monkeypatch.setitem(sys.modules, wrappers.GPU_OPS, module)
    torch: Any = ModuleType("torch")
    torch.cuda = mocker.Mock()
    monkeypatch.setitem(sys.modules, "torch", torch)
    return SimpleNamespace(module=module, cuda=torch.cuda)


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("copy", [stand_in, print])
@pytest.mark.parametrize(("record", "early"), [(stand_in, True), (ours, False), (print, False), (None, False)])
def test_the_release_s_own_copy_is_followed_by_a_wait_where_what_counts_it_as_ended_does_not_wait(
    device: Any, to_host: bool, on_device: bool, copy: Any, record: Any, early: bool
) -> None:
    """Of memory that is pinned at once: its copy is in the stream's order, whatever operations there are."""
    device.module.lmc_ops.lmcache_memcpy_async = copy
    if record:
        device.module.lmc_ops.record_completion_on_stream = record
    livepatch = PatchContext("lmcache-unordered-copies", {}, {}, lambda: None)
    target = f"{wrappers.GPU_OPS}:lmcache_memcpy_async_{'d2h' if to_host else 'h2d'}"
    memory = SimpleNamespace(parent=lambda: None, raw_tensor=object(), get_size=lambda: 96)
    buffer = SimpleNamespace(is_cuda=on_device, nbytes=96, device="cuda:1")
    order: list[Any] = []
    device.cuda.current_stream.side_effect = lambda place: SimpleNamespace(synchronize=lambda: order.append(place))

    def release(*args: Any) -> str:
        order.append(args)
        return "answer"

    args = (buffer, memory) if to_host else (memory, buffer)
    assert wrappers.wrappers(livepatch)[target](release, *args) == "answer"
    assert order == [args, *(["cuda:1"] if on_device and early else [])]
    assert livepatch.counters == {}
