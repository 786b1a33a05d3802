"""What a MultiConnector's child tells that has no metrics to show it in is left out, as from 0.33.0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiKVConnectorPromMetrics.observe"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target."""

    def observe(wrapped: Callable[..., Any], metrics: Any, args: Any, kwargs: Any) -> Any:
        reported: Mapping[str, Any] = args[0] if args else kwargs["transfer_stats_data"]
        known = {name: data for name, data in reported.items() if name in metrics._prom_metrics}
        if len(known) == len(reported):
            return wrapped(*args, **kwargs)
        livepatch.count("left_out", len(reported) - len(known))
        if args:
            return wrapped(known, *args[1:], **kwargs)
        return wrapped(**{**kwargs, "transfer_stats_data": known})

    return {TARGET: observe}
