"""To 0.29.0: how a worker reports a load that failed. The base class of connectors answers that none has."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

from .asks import blocks_of

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

LOST = "_livepatch_lost_blocks"
"""Attribute of a worker to 0.29.0: a queue of the blocks of loads that failed, for the next report."""


def prepare(worker: Any) -> None:
    vars(worker).setdefault(LOST, queue.SimpleQueue())


def report(livepatch: PatchContext, worker: Any, pull: Any) -> None:
    blocks = blocks_of(pull)
    if not blocks:
        return  # it only asked prefill to let go; no request waits for it
    livepatch.tell("failed", "a load came to nothing, and is told to the scheduler")
    getattr(worker, LOST).put(blocks)
    worker.finished_recving_reqs.add(pull.d_req_id)


def told_by(livepatch: PatchContext, connector: Any) -> None:
    """From now on this connector, which the scheduler's process asks, names the blocks of loads that failed."""
    worker = connector.connector_worker

    def load_errors(original: Any, instance: Any, *rest: Any, **named: Any) -> set[int]:
        blocks = set(original(*rest, **named))
        reported = getattr(worker, LOST, None)
        while reported is not None and not reported.empty():
            blocks |= reported.get()
        return blocks

    livepatch.around_its(connector, "get_block_ids_with_load_errors", load_errors)
