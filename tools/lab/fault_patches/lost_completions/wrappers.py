"""A share of completed sends is never reported to the scheduler: a fault, for the lab."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target."""
    share: float = livepatch.options["SHARE"]
    draw = random.Random(livepatch.options["SEED"])
    begun = False

    def lost() -> bool:
        nonlocal begun
        first, begun = not begun, True
        return share > 0 and (first or draw.random() < share)

    @contextmanager
    def lossy(original: Callable[..., Any], *rest: Any, **named: Any) -> Iterator[Any]:
        with original(*rest, **named) as output:
            yield output
        # Only on leaving does the original ask the connector what has finished.
        if output.finished_sending:
            reported = {request_id for request_id in sorted(output.finished_sending) if not lost()}
            livepatch.count("lost", len(output.finished_sending) - len(reported))
            livepatch.count("passed_on", len(reported))
            output.finished_sending = reported

    return {TARGET: lossy}
