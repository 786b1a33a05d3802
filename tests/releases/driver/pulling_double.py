# mypy: disable-error-code="import-not-found"
"""A decode engine's connector beside the OffloadingConnector: it loads prompts, which are there at once, asynchronously.

It stands in for NIXL and its like, both sides of it: no prefill engine is here to read from. `pulled` of a request's
transfer parameters is how many tokens of its prompt prefill holds.
"""

from __future__ import annotations

from typing import Any

from schedulers_connector import SchedulersConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole, SupportsHMA


class Pulls(KVConnectorMetadata):  # type: ignore[misc]
    """For the worker: of each request whose load begins, its prompt as far as it is loaded, and its blocks by group."""

    def __init__(self, begun: dict[str, tuple[list[int], list[list[int]]]]) -> None:
        self.begun = begun


class PullingDouble(SchedulersConnector, SupportsHMA):  # type: ignore[misc]
    """Both sides. A load writes its blocks in the step that it is asked for, and is reported two steps later."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        except TypeError:  # of a release whose base class takes no configuration of the cache
            super().__init__(vllm_config, role)
        self.block = vllm_config.cache_config.block_size
        self.begun: dict[str, tuple[list[int], list[list[int]]]] = {}
        self.device: dict[int, tuple[Any, ...]] = {}
        """The worker's memory: the world sets it."""
        self.under_way: list[set[str]] = [set(), set()]
        self.worker = role == KVConnectorRole.WORKER

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        pulled = (request.kv_transfer_params or {}).get("pulled", 0) - num_computed_tokens
        return max(0, pulled), pulled > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            pulled = request.kv_transfer_params.pop("pulled")
            tables = [[block.block_id for block in group] for group in blocks.blocks]
            self.begun[request.request_id] = (list(request.prompt_token_ids[:pulled]), tables)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        begun, self.begun = self.begun, {}
        return Pulls(begun)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    # The worker's side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        begun = self._get_connector_metadata().begun
        for prompt, tables in begun.values():
            for place in range(len(prompt)):
                for table in tables:
                    block = table[place // self.block]
                    if block:
                        slots = self.device.get(block, ())[: place % self.block]
                        self.device[block] = (*slots, tuple(prompt[: place + 1]))
        self.under_way.append(set(begun))

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        return None, self.under_way.pop(0) or None
