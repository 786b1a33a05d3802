"""`lmcache-unloaded-stores`: which requests have blocks that were not loaded, step by step.

What of LMCache and vLLM is concerned is in tests/releases/test_lmcache_within_step.py.
"""

from __future__ import annotations

import json
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.lmcache_unloaded_stores import workers
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

    def __init__(self, rank: int = 0, world: int = 1, stages: int = 1) -> None:
        parallel = SimpleNamespace(rank=rank, world_size=world, pipeline_parallel_size=stages)
        self._vllm_config = SimpleNamespace(parallel_config=parallel)
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
        self.load(set(failed))
        return self.save()

    def load(self, failed: set[int]) -> None:
        self._invalid_block_ids = failed
        self.wrap[f"{patch.CONNECTOR}.start_load_kv"].look(None, self)
        failed.clear()  # as when vLLM fetches it before the stores

    def save(self) -> list[str]:
        requests = self.metadata.requests
        self.wrap[f"{patch.CONNECTOR}.wait_for_save"].look(self)
        return [request.req_id for request in requests if request.save_spec is not None and request.save_spec.can_save]

    def give(self, scheduled: Any, *requests: Any) -> list[int]:
        """The blocks that the scheduler's part says are given in a step."""
        metadata = SimpleNamespace(requests=list(requests))
        self.wrap[f"{patch.CONNECTOR}.build_connector_meta"].look(metadata, self, scheduled)
        given: list[int] = getattr(metadata, patch.GIVEN)
        return given


def request_meta(name: str, *blocks: int, cached: int | None = None) -> Any:
    """What a worker is told of a request: its blocks, and where it begins `cached` tokens of its prefix."""
    slots = Slots(block * SIZE + place for block in blocks for place in range(SIZE))
    load = None if cached is None else SimpleNamespace(vllm_cached_tokens=cached, can_load=True)
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
    assert worker.step(request_meta("a", 1, 2, 3), request_meta("b", 9), failed=(2,), given=(2, 3, 9)) == ["b"]
    assert worker.metadata.requests[0].save_spec.skip_leading_tokens == 12
    assert worker.step(request_meta("a", 1, 2, 3, 4), request_meta("b", 9, 8), given=(4, 8)) == ["b"]
    assert worker.step(request_meta("c", 1, 2, 3, 4, 7), given=(7,)) == []  # shares them, and what was computed on them
    assert worker.step(request_meta("d", 4), request_meta("e", 1, 6), given=(4, 6)) == ["d", "e"]
    assert worker.step(request_meta("c", 1, 2, 3, 4, 7, 10), given=(10,)) == []
    assert worker.step(request_meta("a", 3, 2, 5, 4), given=(3, 2, 5, 4)) == ["a"]
    assert worker.step(request_meta("f", 2, 10), given=(10,)) == ["f"]
    assert worker.context.counters == {"not_stored": 4}


def test_what_is_shared_spreads_in_any_order(worker: Worker) -> None:
    assert worker.step(request_meta("y", 3, 5), request_meta("x", 2, 3), failed=(2,)) == []
    assert worker.step(request_meta("z", 5)) == []


def test_a_block_is_lost_until_it_is_given_to_whomever(worker: Worker) -> None:
    """Also to a request that the worker is not told of, which has an answer or less than a chunk written to it."""
    worker.step(request_meta("a", 1, 2), failed=(2,), given=(1, 2))
    assert worker.step(request_meta("b", 3, 2)) == []
    assert worker.step(given=(2,)) == []
    assert worker.step(request_meta("b", 4, 2, 5)) == ["b"]
    assert getattr(worker, patch.LOST).blocks == set()


def test_what_a_producer_would_send_is_not_sent(worker: Worker) -> None:
    """LMCache goes by `disagg_spec` there, whatever is to be saved."""
    worker.step(request_meta("a", 1, 2), request_meta("b", 3), failed=(2,))
    assert [request.disagg_spec is None for request in worker.metadata.requests] == [True, False]


def test_nothing_to_store_is_left_alone(worker: Worker) -> None:
    request = request_meta("a", 1)
    request.save_spec = None
    assert worker.step(request, failed=(1,)) == []
    assert worker.context.counters == {}


def test_what_is_lost_stays_so_when_the_patch_stands_aside(worker: Worker) -> None:
    assert {name.rpartition(".")[2]: worker.context.lasts(wrapper) for name, wrapper in worker.wrap.items()} == {
        "build_connector_meta": True,
        "start_load_kv": True,
        "wait_for_save": True,
    }


def test_what_is_given_in_a_step(worker: Worker) -> None:
    """What the prefix cache has is not given; where LMCache loads behind that, vLLM's own number counts the load, too."""
    assert worker.give(scheduled(("a", 5, [1, 2, 3]), ("b", 8, [4, 5, 6])), request_meta("b", 4, 5, cached=4)) == [
        3,
        5,
        6,
    ]
    assert worker.give(scheduled(c=(9, [7]), d=(9, None))) == [7]
    resumed = scheduled(again=(9, [1, 2, 3, 8]), again_too=(8, [4, 5, 6]))
    assert worker.give(resumed, request_meta("again_too", cached=4)) == [8, 5, 6]


class Store:
    """As torch.distributed's, without its waiting: what is not there at once does not come within the time."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.waits: list[list[str]] = []

    def set(self, key: str, value: str) -> None:
        self.keys[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.keys[key]

    def check(self, keys: list[str]) -> bool:
        return self.keys.keys() >= set(keys)

    def delete_key(self, key: str) -> bool:
        return self.keys.pop(key, None) is not None

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        assert timeout == timedelta(seconds=1)
        self.waits.append(keys)
        if not self.check(keys):
            raise RuntimeError("wait timeout")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(workers, "opened", lambda: store)
    return store


def step_of(*all_workers: Worker, number: int = 1, failed: dict[int, set[int]] | None = None) -> list[list[str]]:
    """A step that loads two requests behind a block of the prefix cache, and runs a third; who stores, by worker."""
    for worker in all_workers:
        requests = [
            request_meta("a", 1, 2, 3, cached=4),
            request_meta("b", 4, 5, cached=4),
            request_meta("c", 9, cached=0),
        ]
        requests[2].load_spec.can_load = False  # the prefix cache has it by now
        worker.metadata = SimpleNamespace(requests=requests, **{patch.LOADS: ("s", number), patch.GIVEN: [2, 3, 5, 9]})
    for rank, worker in enumerate(all_workers):
        worker.load(set((failed or {}).get(rank, ())))
    return [worker.save() for worker in all_workers]


def test_what_one_did_not_load_none_stores(store: Store) -> None:
    pair = [Worker(rank, 2) for rank in range(2)]
    assert step_of(*pair) == [["a", "b", "c"]] * 2
    assert step_of(*pair, number=2, failed={1: {3}}) == [["b", "c"]] * 2
    assert step_of(*pair, number=3) == [["a", "b", "c"]] * 2  # given anew
    assert [worker.context.counters for worker in pair] == [{"not_stored": 1}] * 2


def test_an_earlier_stage_does_not_compute_on_a_later_ones_loads(store: Store) -> None:
    four = [Worker(rank, 4, stages=2) for rank in range(4)]
    assert step_of(*four, failed={3: {3}}) == [["a", "b", "c"]] * 2 + [["b", "c"]] * 2
    assert step_of(*four, number=2, failed={0: {5}}) == [["a", "c"]] * 4
    assert {len(keys) for keys in store.waits} == {1, 3}


def test_the_first_of_a_pipeline_tells_though_it_hears_nobody(store: Store) -> None:
    both = [Worker(rank, 2, stages=2) for rank in range(2)]
    assert step_of(*both, failed={0: {3}}) == [["b", "c"]] * 2
    assert len(store.waits) == 1


def test_who_says_nothing_is_waited_for_once_and_what_was_loaded_is_not_stored(store: Store) -> None:
    worker = Worker(0, 2)
    assert [step_of(worker, number=number) for number in (1, 2)] == [[["c"]]] * 2
    assert worker.context.counters == {"not_heard": 2, "not_stored": 4}
    assert len(store.waits) == 1
    assert step_of(worker, Worker(1, 2), number=3) == [["a", "b", "c"]] * 2  # it has the patch, and began later


def test_who_is_late_is_waited_for_again(store: Store) -> None:
    worker, late = pair = [Worker(rank, 2) for rank in range(2)]
    step_of(*pair)
    assert step_of(worker, number=2) == [["c"]]
    assert step_of(worker, number=3) == [["c"]]
    assert step_of(late, number=3) == [["a", "b", "c"]]  # it hears what was said before
    assert step_of(*pair, number=4) == [["a", "b", "c"]] * 2
    assert len(store.waits) == 2 + 1 + 1 + 1 + 2


def test_words_are_forgotten(store: Store) -> None:
    pair = [Worker(rank, 2) for rank in range(2)]
    for number in range(workers.KEPT + 10):
        step_of(*pair, number=number)
    assert len(store.keys) == 2 * (workers.KEPT + 1)
    assert json.loads(store.get(workers.word(("s", number), 1))) == []


def test_one_worker_asks_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "opened", None)
    assert step_of(Worker(), failed={0: {3}}) == [["b", "c"]]


@pytest.mark.parametrize("error", [ValueError("no default process group"), RuntimeError("the store has gone")])
def test_without_a_store_what_was_loaded_is_not_stored(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def opened() -> None:
        raise error

    monkeypatch.setattr(workers, "opened", opened)
    assert step_of(Worker(0, 2)) == [["c"]]


def test_a_step_that_loads_has_a_number_of_its_own(worker: Worker) -> None:
    def step(*requests: Any) -> Any:
        metadata = SimpleNamespace(requests=list(requests))
        worker.wrap[f"{patch.CONNECTOR}.build_connector_meta"].look(metadata, worker, scheduled())
        return getattr(metadata, patch.LOADS, None)

    seen = request_meta("b", 2, cached=0)
    seen.load_spec.can_load = False
    first, second = step(request_meta("a", 1, cached=0)), step(request_meta("a", 1, cached=0), request_meta("b", 2))
    assert first[0] == second[0]
    assert (first[1], second[1]) == (0, 1)
    assert step(request_meta("a", 1), seen) is None
