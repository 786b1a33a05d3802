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
    def __init__(self) -> None:
        self.context = PatchContext("lmcache-unloaded-stores", {}, {}, lambda: None)
        self.wrap = patch.wrappers(self.context)
        self._block_size = SIZE
        self._invalid_block_ids: set[int] = set()
        self._parent = SimpleNamespace(_get_connector_metadata=lambda: SimpleNamespace(requests=self.requests))
        self.requests: list[Any] = []

    def step(self, *requests: Any, failed: tuple[int, ...] = ()) -> list[str]:
        """The requests that may store in a step."""
        self.requests, self._invalid_block_ids = list(requests), set(failed)
        self.wrap[f"{patch.CONNECTOR}.wait_for_save"].look(self, (), {})
        return [request.req_id for request in requests if request.save_spec is not None and request.save_spec.can_save]

    def finish(self, name: str) -> None:
        self.wrap[f"{patch.CONNECTOR}.get_finished"].look(self, ({name},), {})


def told(name: str, *blocks: int, cached: int | None = None, tokens: int = 0) -> Any:
    """What a worker is told of a request: its blocks, and where it begins `cached` tokens of its prefix."""
    slots = Slots(block * SIZE + place for block in blocks for place in range(SIZE))
    slots = slots[: tokens or len(slots)]
    load = None if cached is None else SimpleNamespace(vllm_cached_tokens=cached)
    save = SimpleNamespace(can_save=True, skip_leading_tokens=0)
    return SimpleNamespace(req_id=name, token_ids=list(slots), slot_mapping=slots, load_spec=load, save_spec=save)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_who_has_lost_blocks_stores_nothing_until_it_begins_anew(worker: Worker) -> None:
    assert worker.step(told("a", 1, 2, 3, cached=4), told("b", 9, cached=0), failed=(2,)) == ["b"]
    assert worker.requests[0].save_spec.skip_leading_tokens == 12
    assert worker.step(told("a", 1, 2, 3, 4), told("b", 9, 8)) == ["b"]
    assert worker.step(told("c", 1, 2, 3, 4, 7, cached=16)) == []  # shares them, and what was computed on them
    assert worker.step(told("d", 4, cached=0), told("e", 1, 6, cached=4)) == ["d", "e"]
    assert worker.step(told("c", 1, 2, 3, 4, 7, 10)) == []
    assert worker.step(told("a", 3, 2, 5, 4, cached=0)) == ["a"]
    assert worker.step(told("f", 2, 10, cached=4)) == ["f"]
    assert worker.context.counters == {"not_stored": 4}


def test_what_is_shared_spreads_in_any_order(worker: Worker) -> None:
    assert worker.step(told("y", 3, 5, cached=4), told("x", 2, 3, cached=0), failed=(2,)) == []
    assert worker.step(told("z", 5, cached=4)) == []


def test_blocks_that_a_running_request_gets_are_its_own(worker: Worker) -> None:
    worker.step(told("a", 1, 2, cached=0), told("b", 5, 6, cached=0, tokens=6), failed=(2,))
    assert worker.step(told("b", 5, 6, 2)) == ["b"]
    assert worker.step(told("c", 2, cached=4)) == ["c"]
    worker.step(told("a", 1, 2, cached=0), failed=(2,))
    worker.finish("b")
    assert worker.step(told("b", 5, 6, 7, 2)) == []  # of whom nothing is known
    worker.step(told("d", 8, 9, cached=0, tokens=6), failed=(9,))
    assert worker.step(told("d", 8, 9, 10)) == []  # it fills up the lost block


def test_nothing_to_store_is_left_alone(worker: Worker) -> None:
    request = told("a", 1, cached=0)
    request.save_spec = None
    assert worker.step(request, failed=(1,)) == []
    assert worker.context.counters == {}
