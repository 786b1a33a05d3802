# mypy: disable-error-code="import-not-found"
"""What doubles of KV connectors have in common: none of them has a worker's side."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class SchedulersConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The scheduler's side of a connector."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Belong to the worker's side, which is the driver's, where there is one."""
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Belong to the worker's side."""
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Belong to the worker's side."""
        raise NotImplementedError

    def wait_for_save(self) -> None:
        """Belong to the worker's side."""
        raise NotImplementedError
