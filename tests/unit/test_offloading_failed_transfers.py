"""`offloading-failed-transfers`: what was taken from the release is told, whatever happens in between.

Worker and scheduler are stand-ins: what of a release is concerned is in tests/releases/test_offloading_failed_transfers.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.offloading_failed_transfers import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext

LOAD, STORE = 4, 5


class Metadata:
    def __init__(self) -> None:
        self.completed_jobs: dict[int, int] = {}

    def mark_completed(self, job_id: int) -> None:
        self.completed_jobs[job_id] = 1


class Backend:
    """Moves nothing; what has ended, and how, is said beforehand."""

    def __init__(self) -> None:
        self.ended: list[Any] = []

    def submit_load(self, job_id: int, source: Any, target: Any) -> bool:
        return job_id != LOAD

    def get_finished(self) -> list[Any]:
        return self.ended


class Connector:
    """As the base class of connectors has it."""

    def __init__(self, worker: Any) -> None:
        self.connector_worker = worker

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {1}


class Manager:
    def __init__(self) -> None:
        self.completed: list[tuple[set[str], bool]] = []

    def complete_store(self, keys: set[str], req_context: Any, success: bool = True) -> None:
        self.completed.append((keys, success))


class Side:
    """A patched worker and a patched scheduler."""

    def __init__(self) -> None:
        self.context = PatchContext("offloading-failed-transfers", {}, {}, lambda: None)
        self.wrap = patch.wrappers(self.context)
        self.backend = Backend()
        self.worker = SimpleNamespace(worker=self.backend, _load_jobs={LOAD: "r"}, _connector_worker_meta=Metadata())
        self.connector = Connector(self.worker)
        self.manager = Manager()
        self.scheduler = SimpleNamespace(manager=self.manager, _jobs={STORE: SimpleNamespace(keys={"a"})})

    def begin(self, loads: dict[int, Any] | None = None) -> None:
        load = SimpleNamespace(dst_spec=SimpleNamespace(block_ids=[7, 8]))
        metadata = SimpleNamespace(load_jobs=loads or {LOAD: load})
        self.wrap[f"{patch.WORKER}.start_kv_transfers"].look(self.worker, metadata)

    def report(self) -> tuple[set[str], set[int], dict[int, int]]:
        """The worker's side of a step: the ends, the blocks and the jobs that are told."""
        answer: tuple[set[str], set[str]] = (set(), set())
        self.wrap[f"{patch.CONNECTOR}.get_finished"].look(answer, self.connector, set())
        blocks = self.connector.get_block_ids_with_load_errors()
        metadata, self.worker._connector_worker_meta = self.worker._connector_worker_meta, Metadata()
        return answer[1], blocks, metadata.completed_jobs

    def hear(self, jobs: dict[int, int]) -> dict[int, int]:
        output = SimpleNamespace(kv_connector_worker_meta=SimpleNamespace(completed_jobs=jobs))
        self.wrap[f"{patch.SCHEDULER}.update_connector_output"].look(self.scheduler, output)
        return jobs


@pytest.fixture
def side() -> Side:
    return Side()


def result(job: int, success: bool) -> Any:
    return SimpleNamespace(job_id=job, success=success)


def test_what_was_taken_is_reported_after_the_patch_stood_aside(side: Side) -> None:
    side.begin()
    side.backend.ended = [result(STORE, False), result(LOAD, False), result(6, True)]
    assert [ended.job_id for ended in side.backend.get_finished()] == [6]
    side.hear({~STORE: 1})
    assert all(
        side.context.lasts(side.wrap[name])
        for name in (f"{patch.CONNECTOR}.get_finished", f"{patch.SCHEDULER}.update_connector_output")
    )
    side.context.stand_aside("here", ValueError())
    assert side.report() == ({"r"}, {1, 7, 8}, {LOAD: 1, ~STORE: 1})
    assert side.report() == (set(), {1}, {})
    side.scheduler.manager.complete_store(side.scheduler._jobs[STORE].keys, None)
    assert side.manager.completed == [({"a"}, False)]
    assert [ended.job_id for ended in side.backend.get_finished()] == [STORE, LOAD, 6]  # the release's own answer


def test_a_load_within_the_step_is_left_to_the_release(side: Side) -> None:
    """Refused or failed, it is told as the backend told it. Another is reported, also where it was refused by name."""
    within = SimpleNamespace(dst_spec=SimpleNamespace(block_ids=[5]), sync=True)
    side.begin({LOAD: within, 6: within})
    assert side.backend.submit_load(LOAD, None, None) is False
    assert side.backend.submit_load(6, None, None) is True
    side.backend.ended = [result(6, False)]
    assert side.backend.get_finished() == side.backend.ended
    assert side.report() == (set(), {1}, {})
    side.begin()
    assert side.backend.submit_load(job_id=LOAD, source=None, target=None) is True
    assert side.report() == ({"r"}, {1, 7, 8}, {LOAD: 1})


def test_loads_that_fail_in_one_step_are_all_reported(side: Side) -> None:
    side.worker._load_jobs[6] = "s"
    side.begin()
    side.begin({6: SimpleNamespace(dst_spec=SimpleNamespace(block_ids=[9]))})
    side.backend.ended = [result(LOAD, False), result(6, False)]
    assert side.backend.get_finished() == []
    assert side.report() == ({"r", "s"}, {1, 7, 8, 9}, {LOAD: 1, 6: 1})


def test_a_load_that_went_well_is_forgotten(side: Side) -> None:
    side.begin()
    side.backend.ended = [result(LOAD, True)]
    side.backend.get_finished()
    assert getattr(side.worker, patch.JOBS).loads == {}
    side.begin({LOAD: SimpleNamespace(dst_spec=SimpleNamespace(block_ids=[5]), sync=True)})
    side.backend.get_finished()
    assert getattr(side.worker, patch.JOBS).loads == {}


def test_only_the_store_that_failed_is_dropped(side: Side) -> None:
    """Of two workers one failed; another store has the same keys; a store was forgotten by a reset."""
    side.scheduler._jobs |= {6: SimpleNamespace(keys={"a"}), 7: SimpleNamespace(keys={"b"})}
    assert side.hear({STORE: 1, ~STORE: 1, 6: 2}) == {STORE: 2, 6: 2}
    complete = side.scheduler.manager.complete_store
    complete(side.scheduler._jobs[6].keys, None)
    complete(keys=side.scheduler._jobs.pop(STORE).keys, req_context=None)
    assert side.manager.completed == [({"a"}, True), ({"a"}, False)]
    assert getattr(side.scheduler, patch.FAILED) == {}
    side.hear({~7: 1})
    forgotten = side.scheduler._jobs.pop(7).keys
    assert side.hear({~9: 1}) == {9: 1}
    assert getattr(side.scheduler, patch.FAILED) == {}
    complete(forgotten, None)
    assert side.manager.completed[2:] == [({"b"}, True)]
