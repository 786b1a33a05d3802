"""A MultiConnector's child that has no metrics of its own is left out of them: no fault, a run ends without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiKVConnectorPromMetrics.observe"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target, in wrapt's form (wrapped, instance, args, kwargs)."""

    def observe(wrapped: Callable[..., Any], metrics: Any, args: Any, kwargs: Any) -> Any:
        told: Mapping[str, Any] = args[0] if args else kwargs.pop("transfer_stats_data")
        known = {name: data for name, data in told.items() if name in metrics._prom_metrics}
        livepatch.count("left_out", len(told) - len(known))
        return wrapped(known, *args[1:], **kwargs)

    return {TARGET: observe}
