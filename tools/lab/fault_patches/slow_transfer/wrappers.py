"""Every completed transfer is reported to the scheduler later: a fault, for the lab."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output"
KINDS = ("finished_sending", "finished_recving")


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target."""
    seconds: float = livepatch.options["SECONDS"]
    kept: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}  # ids, and when they are to be reported

    @contextmanager
    def slow(original: Callable[..., Any], *rest: Any, **named: Any) -> Iterator[Any]:
        with original(*rest, **named) as output:
            yield output
        # Only on leaving does the original ask the connector what has finished.
        now = time.monotonic()
        for kind, due in kept.items():
            finished = getattr(output, kind) or ()
            livepatch.count("delayed", len(finished))
            for request_id in finished:
                due[request_id] = now + seconds
            reported = {request_id for request_id, at in due.items() if at <= now}
            for request_id in reported:
                del due[request_id]
            setattr(output, kind, reported or None)

    return {TARGET: slow}
