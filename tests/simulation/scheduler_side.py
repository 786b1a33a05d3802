# mypy: disable-error-code="import-not-found"
"""The connector that the scheduler is given: it hands every question on to the world that is being simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedulers_connector import SchedulersConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA

from tests.simulation.connectors import BEHAVIOURS, Multi

if TYPE_CHECKING:
    from tests.simulation.world import World

CURRENT: list[World] = []
"""The world whose scheduler is being made; a scheduler makes its connector itself."""


class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the worker: the loads that were asked for since the last step."""

    def __init__(self, loads: list[Any]) -> None:
        self.loads = loads


class SimulatedConnector(SchedulersConnector, SupportsHMA):  # type: ignore[misc]
    """The scheduler's side."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.world = CURRENT[-1]
        # Patches tell connectors by their class's name, and a MultiConnector by its children.
        if isinstance(self.world.behaviour, Multi):
            self._connectors = [type(name, (), {})() for name in self.world.behaviour.class_names]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.world.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.world.ask_for_load(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return Metadata(self.world.take_asked())

    def update_connector_output(self, connector_output: Any) -> None:
        """Nothing: completions are the worker's word."""

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups: a load fills every block that it was given."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return self.world.begin_sends(request, block_ids), None


for _behaviour in BEHAVIOURS.values():
    # By another name than the release's own, which some releases would take instead; patches look at the class's.
    _class = type(_behaviour.class_name, (SimulatedConnector,), {"__module__": __name__})
    globals()[f"Simulated{_behaviour.class_name}"] = _class
