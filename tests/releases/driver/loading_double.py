# mypy: disable-error-code="import-not-found"
"""A KV connector that answers each lookup as its request says, at once or later, and notes the loads that begin."""

from __future__ import annotations

from typing import Any

from connector_double import ConnectorDouble


class LoadingDouble(ConnectorDouble):
    """`hit` of a request's transfer parameters is what the other side holds of it, in tokens from its beginning;
    `unanswered` is how many lookups are answered with None before that is known; `once` that it is loaded only once."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.begun: list[tuple[str, int, int]] = []
        """Loads that began: request, first and last token."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What the other side holds beyond what is computed, to arrive asynchronously."""
        parameters = request.kv_transfer_params
        if parameters["unanswered"]:
            parameters["unanswered"] -= 1
            return None, False
        wanted = parameters["hit"] - num_computed_tokens
        return (wanted, True) if wanted > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin a load, where there is one."""
        parameters = request.kv_transfer_params
        if num_external_tokens:
            self.begun.append((request.request_id, parameters["hit"] - num_external_tokens, parameters["hit"]))
            if parameters["once"]:
                parameters["hit"] = 0

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Keep no request's blocks."""
        return False, None
