# mypy: disable-error-code="import-not-found"
"""A KV connector that moves nothing: it promises what a request's transfer parameters say, and keeps a log."""

from __future__ import annotations

from typing import Any

from schedulers_connector import SchedulersConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

LOADED_TOKENS = 32
"""Tokens that a request with `load` finds elsewhere: whole blocks, and fewer than its prompt."""


class ConnectorDouble(SchedulersConnector):
    """The scheduler's side of a connector with asynchronous loads and stores."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.notified: list[tuple[list[str], list[str]]] = []
        """What each step reported, in order: the ids that finished receiving, and those sending."""
        self.expired: set[str] = set()
        """Ids of sends that the connector itself is about to give up, and to call finished."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Promise the tokens of a request that asks for a load, to arrive asynchronously."""
        wanted = LOADED_TOKENS - num_computed_tokens if request.kv_transfer_params["load"] else 0
        return max(0, wanted), wanted > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take note of nothing: the driver decides when a load ends."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return an empty message to the worker that does not exist."""
        return KVConnectorMetadata()

    def update_connector_output(self, connector_output: Any) -> None:
        """Log what the scheduler passed on, and add the sends that are given up, as MoRI-IO does."""
        recving, sending = connector_output.finished_recving, connector_output.finished_sending
        self.notified.append((sorted(recving or ()), sorted(sending or ())))
        if self.expired:
            connector_output.finished_sending = self.expired.union(sending or ())
            self.expired = set()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Ask to keep the blocks of a request with `delay_free` until they were sent."""
        return request.kv_transfer_params["delay_free"], None
