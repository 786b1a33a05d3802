# mypy: disable-error-code="import-not-found"
"""A KV connector that holds nothing, and never sends or receives: beside another one in a MultiConnector."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class QuietConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both sides of it."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **_: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None: ...

    def wait_for_save(self) -> None: ...
