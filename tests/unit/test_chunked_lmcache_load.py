"""Where a part of a load ends, and who is left alone. What needs a scheduler is in tests/releases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm_livepatch.patches.chunked_lmcache_load import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext

SCHEDULE = f"{patch.SCHEDULER}.schedule"


def context(max_tokens: int = 32768) -> PatchContext:
    return PatchContext("chunked-lmcache-load", {"max_tokens": max_tokens}, {}, lambda: None)


class FullAttentionManager:
    def __init__(self) -> None:
        self.block_size = 16
        self.req_to_blocks: dict[str, list[int]] = {}


def scheduler(connector: Any) -> Any:
    coordinator = SimpleNamespace(single_type_managers=[FullAttentionManager()])
    return SimpleNamespace(
        connector=connector,
        block_size=16,
        finished_recving_kv_req_ids=set(),
        failed_recving_kv_req_ids=set(),
        kv_cache_manager=SimpleNamespace(coordinator=coordinator),
    )


def lmcache(chunk: int) -> Any:
    adapter = SimpleNamespace(num_blocks_per_chunk=lambda: chunk // 16)
    return SimpleNamespace(
        request_trackers={},
        scheduler_adapter=adapter,
        vllm_block_size=16,
        get_num_new_matched_tokens=lambda request, computed: (None, True),
    )


@given(
    chunk=st.integers(1, 64).map(lambda blocks: blocks * 16),
    max_tokens=st.integers(1, 5000),
    blocks=st.integers(0, 300),
    more=st.integers(1, 5000),
)
def test_parts_are_whole_chunks_and_use_up_the_hit(chunk: int, max_tokens: int, blocks: int, more: int) -> None:
    loads = patch._Loads(scheduler(lmcache(chunk)), context(max_tokens))
    start = blocks * 16
    end, parts = start + more, 0
    while start < end:
        at = loads.part_end(start, end)
        assert start < at <= end
        assert at == end or at % chunk == 0
        assert at - start <= max(max_tokens, chunk)
        start, parts = at, parts + 1
    assert parts <= 2 + more // max(1, min(max_tokens // chunk, 1) * chunk)


def test_an_answer_to_come_later_passes_through() -> None:
    connector = lmcache(64)
    loads = patch._Loads(scheduler(connector), context())
    assert connector.get_num_new_matched_tokens == loads.matched
    assert loads.matched(SimpleNamespace(request_id="one"), 0) == (None, True)


def test_another_connector_is_left_alone() -> None:
    connector = SimpleNamespace(get_num_new_matched_tokens=None)
    stepped = scheduler(connector)
    schedule = patch.wrappers(context())[SCHEDULE]
    assert schedule(lambda: "scheduled", stepped, (), {}) == "scheduled"
    assert connector.get_num_new_matched_tokens is None


def test_no_connector_at_all() -> None:
    schedule = patch.wrappers(context())[SCHEDULE]
    assert schedule(lambda: "scheduled", scheduler(None), (), {}) == "scheduled"
