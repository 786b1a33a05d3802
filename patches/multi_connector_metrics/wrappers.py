"""What a MultiConnector's child tells that has no metrics to show it in is left out, as from 0.33.0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiKVConnectorPromMetrics.observe"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target."""

    def observe(
        original: Callable[..., Any], metrics: Any, transfer_stats_data: Mapping[str, Any], *rest: Any, **named: Any
    ) -> Any:
        known = {name: data for name, data in transfer_stats_data.items() if name in metrics._prom_metrics}
        if len(known) == len(transfer_stats_data):
            return original(transfer_stats_data, *rest, **named)
        livepatch.count("left_out", len(transfer_stats_data) - len(known))
        return original(known, *rest, **named)

    return {TARGET: observe}
