"""A transfer of the OffloadingConnector that failed ends no engine, and nothing that it left behind is used.

Each worker tells the scheduler which jobs have ended (`OffloadingWorkerMetadata.completed_jobs`, a count by job), and
has no word for one that failed. Here a failed store has the job's complement, a negative number: the counts
of several workers are added up as those of any job, and a release that is not patched never takes it for a store that
went well.

Source: vllm#39732, vllm PR#52838, llm-d-kv-cache#514.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
WORKER = f"{MODULE}.worker:OffloadingConnectorWorker"
SCHEDULER = f"{MODULE}.scheduler:OffloadingConnectorScheduler"
CONNECTOR = f"{MODULE}_connector:OffloadingConnector"

JOBS = "_livepatch_jobs"
"""Attribute of a worker: its `_Jobs`."""

FAILED = "_livepatch_failed_stores"
"""Attribute of a scheduler: the keys of each store of which a worker's part failed, by job, until all have ended."""


class _Jobs:
    """What is known of one worker's transfers."""

    __slots__ = ("failed", "loads", "lost")

    def __init__(self) -> None:
        # Of a load under way: the blocks that it fills. None of one within the step (0.33.0, `sync_load_budget_bytes`):
        # what is computed on it is being stored when its failure is heard of, so that ends the engine, as without us.
        self.loads: dict[int, set[int] | None] = {}
        self.failed: set[int] = set()  # jobs that ended without success, or were not begun, and are not reported yet
        self.lost: set[int] = set()  # blocks of loads that failed, for the next report


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """At each target: a wrapper, or a look at its calls."""

    # The worker's side

    def jobs_of(worker: Any) -> _Jobs:
        """The worker's record, made when it is first asked for: then its transfers' ends are listened to."""
        jobs: _Jobs | None = getattr(worker, JOBS, None)
        if jobs is None:
            jobs = _Jobs()
            for carrier in carriers(worker.worker):
                listen(carrier, jobs)
            setattr(worker, JOBS, jobs)
        return jobs

    def listen(carrier: Any, jobs: _Jobs) -> None:
        def submit(original: Call, instance: Any, job_id: int, *rest: Any, **named: Any) -> bool:
            """A transfer that was refused ends with this step. One that raised may have begun: the error goes on."""
            begun: bool = original(job_id, *rest, **named)
            return begun or fail(job_id)

        def get_finished(original: Call, instance: Any, *rest: Any, **named: Any) -> list[Any]:
            """The release is given those that went well, and asserts that they did."""
            ended = original(*rest, **named)
            for result in ended:
                if result.success:
                    jobs.loads.pop(result.job_id, None)
            return [result for result in ended if result.success or not fail(result.job_id)]

        def fail(job: int) -> bool:
            """Note a failed transfer; False where it is left to the release."""
            if jobs.loads.get(job, ()) is None:
                return False
            jobs.failed.add(job)
            return True

        for name in ("transfer_async", "submit_store", "submit_load"):
            if hasattr(carrier, name):
                livepatch.around_its(carrier, name, submit)
        livepatch.around_its(carrier, "get_finished", get_finished)

    def start_kv_transfers(worker: Any, metadata: Any, *rest: Any, **named: Any) -> None:
        """Called in every step, also before the first store is begun, which is a step later than it is asked for."""
        jobs = jobs_of(worker)
        for job, load in metadata.load_jobs.items():
            # To 0.24.0 a job has a pair, of source and destination.
            target = load.transfer_spec[1] if hasattr(load, "transfer_spec") else load.dst_spec
            jobs.loads[job] = None if getattr(load, "sync", False) else {int(block) for block in target.block_ids}

    def get_finished(answer: Any, connector: Any, *rest: Any, **named: Any) -> None:
        """Tell of the failed jobs: to the engine which loads have ended, with their blocks; to the scheduler's part of
        the connector that jobs have ended."""
        worker = connector.connector_worker
        jobs: _Jobs | None = getattr(worker, JOBS, None)
        if jobs is None or not jobs.failed:
            return
        metadata = worker._connector_worker_meta
        while jobs.failed:
            job = jobs.failed.pop()
            blocks = jobs.loads.pop(job, None)
            if blocks is None:
                metadata.mark_completed(~job)
                continue
            lose(connector, jobs, blocks)  # before its end is reported
            metadata.mark_completed(job)  # its source may be dropped, or read by others
            answer[1].add(worker._load_jobs.pop(job))
            livepatch.tell("failed_loads", "a load failed: its blocks are reported, and are not used")

    def lose(connector: Any, jobs: _Jobs, blocks: set[int]) -> None:
        """The model runner asks next which blocks were not loaded. The class has the base's answer: none."""
        if "get_block_ids_with_load_errors" not in vars(connector):
            livepatch.around_its(connector, "get_block_ids_with_load_errors", livepatch.lasting(load_errors))
        jobs.lost |= blocks

    def load_errors(original: Call, connector: Any, *rest: Any, **named: Any) -> set[int]:
        jobs: _Jobs = getattr(connector.connector_worker, JOBS)
        lost, jobs.lost = jobs.lost, set()
        return lost | set(original(*rest, **named))

    # The scheduler's side

    def update_connector_output(scheduler: Any, connector_output: Any, *rest: Any, **named: Any) -> None:
        """Of a job that is reported under its complement, a store has failed, and has ended on that many workers."""
        completed = getattr(connector_output.kv_connector_worker_meta, "completed_jobs", None) or {}
        complements = [job for job in completed if job < 0]
        if not complements:
            return
        failed: dict[int, Any] | None = getattr(scheduler, FAILED, None)
        if failed is None:
            failed = {}
            setattr(scheduler, FAILED, failed)
            livepatch.around_its(scheduler.manager, "complete_store", livepatch.lasting(completing(failed)))
        for job in failed.keys() - scheduler._jobs.keys():
            del failed[job]  # the cache was reset while it was under way
        for complement in complements:
            job = ~complement
            completed[job] = completed.get(job, 0) + completed.pop(complement)
            if job in scheduler._jobs:
                failed[job] = scheduler._jobs[job].keys

    def completing(failed: dict[int, Any]) -> Call:
        def complete_store(original: Call, manager: Any, keys: Any, *rest: Any, **named: Any) -> Any:
            """What a failed store has left is not kept: its keys are no hit, and may be stored again."""
            for job, theirs in failed.items():
                if theirs is keys:
                    del failed[job]
                    livepatch.tell("failed_stores", "a store failed: what it wrote is dropped")
                    return original(keys, *rest, **{**named, "success": False})
            return original(keys, *rest, **named)

        return complete_store

    # What was taken from the release is reported, also after the patch has stood aside.
    return {
        f"{WORKER}.start_kv_transfers": livepatch.before(start_kv_transfers),
        f"{CONNECTOR}.get_finished": livepatch.lasting(livepatch.after(get_finished)),
        f"{SCHEDULER}.update_connector_output": livepatch.lasting(livepatch.before(update_connector_output)),
    }


def carriers(worker: Any) -> list[Any]:
    """What moves the bytes: to 0.24.0 handlers behind the worker, which takes an error of theirs for a refusal."""
    return list(getattr(worker, "handlers", None) or [worker])
