"""`lmcache-unloaded-stores`: which requests have blocks that were not loaded, step by step.

What of LMCache and vLLM is concerned is in tests/releases/test_lmcache_within_step.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.lmcache_unloaded_stores import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext

SIZE = 4


class Slots(list[int]):
    """As a tensor gives them."""

    def __getitem__(self, place: Any) -> Any:
        return Slots(super().__getitem__(place))

    def tolist(self) -> list[int]:
        return list(self)


class Worker:
    """A worker's part of the connector, and the scheduler's, which says what blocks are given to be written."""

    def __init__(self) -> None:
        self.context = PatchContext("lmcache-unloaded-stores", {}, {}, lambda: None)
        self.wrap = patch.wrappers(self.context)
        self._block_size = SIZE
        self._invalid_block_ids: set[int] = set()
        self.metadata: Any = SimpleNamespace(requests=[])
        self._parent = SimpleNamespace(_get_connector_metadata=lambda: self.metadata)

    def step(self, *requests: Any, failed: tuple[int, ...] = (), given: tuple[int, ...] = ()) -> list[str]:
        """The requests that may store in a step."""
        self.metadata = SimpleNamespace(requests=list(requests))
        if given:
            setattr(self.metadata, patch.GIVEN, list(given))
        self._invalid_block_ids = set(failed)
        self.wrap[f"{patch.CONNECTOR}.wait_for_save"].look(self, (), {})
        return [request.req_id for request in requests if request.save_spec is not None and request.save_spec.can_save]

    def give(self, scheduled: Any, *requests: Any) -> list[int]:
        """The blocks that the scheduler's part says are given in a step."""
        metadata = SimpleNamespace(requests=list(requests))
        self.wrap[f"{patch.CONNECTOR}.build_connector_meta"].look(self, (scheduled,), {}, metadata)
        given: list[int] = getattr(metadata, patch.GIVEN)
        return given


def told(name: str, *blocks: int, cached: int | None = None) -> Any:
    """What a worker is told of a request: its blocks, and where it begins `cached` tokens of its prefix."""
    slots = Slots(block * SIZE + place for block in blocks for place in range(SIZE))
    load = None if cached is None else SimpleNamespace(vllm_cached_tokens=cached)
    save = SimpleNamespace(can_save=True, skip_leading_tokens=0)
    return SimpleNamespace(
        req_id=name, token_ids=list(slots), slot_mapping=slots, load_spec=load, save_spec=save, disagg_spec=object()
    )


def scheduled(*new: tuple[str, int, list[int]], **cached: tuple[int, list[int] | None]) -> Any:
    """A step: of new requests and of such as run on, what is computed of them and the blocks that they get."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=(blocks,))
            for name, computed, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[computed for computed, _ in cached.values()],
            new_block_ids=[blocks and (blocks,) for _, blocks in cached.values()],
            resumed_req_ids={name for name in cached if name.startswith("again")},
        ),
    )


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_who_has_lost_blocks_stores_nothing_until_it_begins_anew(worker: Worker) -> None:
    assert worker.step(told("a", 1, 2, 3), told("b", 9), failed=(2,), given=(2, 3, 9)) == ["b"]
    assert worker.metadata.requests[0].save_spec.skip_leading_tokens == 12
    assert worker.step(told("a", 1, 2, 3, 4), told("b", 9, 8), given=(4, 8)) == ["b"]
    assert worker.step(told("c", 1, 2, 3, 4, 7), given=(7,)) == []  # shares them, and what was computed on them
    assert worker.step(told("d", 4), told("e", 1, 6), given=(4, 6)) == ["d", "e"]
    assert worker.step(told("c", 1, 2, 3, 4, 7, 10), given=(10,)) == []
    assert worker.step(told("a", 3, 2, 5, 4), given=(3, 2, 5, 4)) == ["a"]
    assert worker.step(told("f", 2, 10), given=(10,)) == ["f"]
    assert worker.context.counters == {"not_stored": 4}


def test_what_is_shared_spreads_in_any_order(worker: Worker) -> None:
    assert worker.step(told("y", 3, 5), told("x", 2, 3), failed=(2,)) == []
    assert worker.step(told("z", 5)) == []


def test_a_block_is_lost_until_it_is_given_to_whomever(worker: Worker) -> None:
    """Also to a request that the worker is not told of, which has an answer or less than a chunk written to it."""
    worker.step(told("a", 1, 2), failed=(2,), given=(1, 2))
    assert worker.step(told("b", 3, 2)) == []
    assert worker.step(given=(2,)) == []
    assert worker.step(told("b", 4, 2, 5)) == ["b"]
    assert getattr(worker, patch.LOST).blocks == set()


def test_what_a_producer_would_send_is_not_sent(worker: Worker) -> None:
    """LMCache goes by `disagg_spec` there, whatever is to be saved."""
    worker.step(told("a", 1, 2), told("b", 3), failed=(2,))
    assert [request.disagg_spec is None for request in worker.metadata.requests] == [True, False]


def test_nothing_to_store_is_left_alone(worker: Worker) -> None:
    request = told("a", 1)
    request.save_spec = None
    assert worker.step(request, failed=(1,)) == []
    assert worker.context.counters == {}


def test_what_is_given_in_a_step(worker: Worker) -> None:
    """What the prefix cache has is not given; where LMCache loads behind that, vLLM's own number counts the load, too."""
    assert worker.give(scheduled(("a", 5, [1, 2, 3]), ("b", 8, [4, 5, 6])), told("b", 4, 5, cached=4)) == [3, 5, 6]
    assert worker.give(scheduled(c=(9, [7]), d=(9, None))) == [7]
    resumed = scheduled(again=(9, [1, 2, 3, 8]), again_too=(8, [4, 5, 6]))
    assert worker.give(resumed, told("again_too", cached=4)) == [8, 5, 6]
