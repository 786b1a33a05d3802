# mypy: disable-error-code="import-not-found"
"""A KV connector whose loads the driver plays: it promises what a request's transfer parameters say, and notes them."""

from __future__ import annotations

from typing import Any

from schedulers_connector import SchedulersConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA

LOADED_TOKENS = 32
"""Tokens that a request with `load` finds elsewhere: whole blocks, and fewer than its prompt."""
UNANSWERED = 6
"""How often a request with the load `asked` is told to ask again, before it loads beside the steps."""


class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker is to load with a step: request id, block ids by group, first token, number of tokens, later."""

    def __init__(self, loads: list[tuple[str, tuple[list[int], ...], int, int, bool]]) -> None:
        self.loads = loads


class ConnectorLosses(SchedulersConnector, SupportsHMA):  # type: ignore[misc]
    """The scheduler's side of a connector that loads in the step itself (`now`), or beside it (`later`, `asked`)."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.local: dict[str, int] = {}
        self.unanswered: dict[str, int] = {}
        self.asked: list[tuple[str, tuple[list[int], ...], int, int, bool]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Promise the tokens of a request that asks for a load, each time anew, as a store does."""
        load = request.kv_transfer_params["load"]
        asked = self.unanswered.get(request.request_id, 0)
        if load == "asked" and asked < UNANSWERED:
            self.unanswered[request.request_id] = asked + 1
            return None, False
        self.local[request.request_id] = num_computed_tokens
        wanted = max(0, LOADED_TOKENS - num_computed_tokens) if load else 0
        return wanted, load in ("later", "asked") and wanted > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the load for the worker."""
        if num_external_tokens:
            name = request.request_id
            tables = tuple(list(table) for table in blocks.get_block_ids())
            later = request.kv_transfer_params["load"] in ("later", "asked")
            self.asked.append((name, tables, self.local[name], num_external_tokens, later))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Hand the loads over to the worker."""
        asked, self.asked = self.asked, []
        return Metadata(asked)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups: a load fills every block that it was given."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Keep nothing."""
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Keep nothing."""
        return False, None
