# mypy: disable-error-code="import-not-found"
"""What MultiConnector passes on of its children's completions, and what MoRI-IO's scheduler side makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from completion_world import ID, bare, found, reported, request, source_of


class Child:
    """A child of a MultiConnector: says what it is told to say."""

    def __init__(self, announces: bool, says: Sequence[str]) -> None:
        self.announces, self.says = announces, list(says)

    def request_finished(self, ended: Any, blocks: list[int]) -> tuple[bool, None]:
        return self.announces, None

    def get_finished(self, ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        letters = self.says.pop(0)
        return ({ID} if "S" in letters else None), ({ID} if "R" in letters else None)

    def get_transfer_results(self, ids: set[str]) -> Any:
        letters = self.says.pop(0)
        results = found("KVConnectorTransferResults", "base", "vllm.v1.outputs")
        return results(
            finished_sending={ID} if "S" in letters else set(), finished_recving={ID} if "R" in letters else set()
        )


def multi(*children: tuple[bool, Sequence[str]], passed_on: bool = True) -> dict[str, Any]:
    """What MultiConnector announces and passes on; `passed_on`: its worker knows the count when the children report."""
    connector_class = found("MultiConnector", "multi_connector")
    made = [Child(*child) for child in children]
    scheduler = bare(connector_class, _connectors=made, _extra_async_saves={}, _requests_to_connector={ID: 0})
    announced = scheduler.request_finished(request(), [1])[0]
    extra = dict(scheduler._extra_async_saves) if passed_on else {}
    worker = bare(connector_class, _connectors=made, _extra_async_saves=extra)
    return {"announced": announced, "reports": [reported(worker.get_finished({ID})) for _ in range(len(made[0].says))]}


def multis() -> dict[str, Any]:
    return {
        "both_announce": multi((True, ["S", "", "", ""]), (True, ["", "", "S", ""])),
        "not_announced_yet": multi((True, ["S", "", "", ""]), (True, ["", "", "S", ""]), passed_on=False),
        "one_announces_other_loads": multi((False, ["", "", "R", ""]), (True, ["S", "", "", ""])),
        "one_announces_and_loads": multi((True, ["S", "", "R", ""]), (False, ["", "", "", ""])),
    }


def moriio_changes() -> dict[str, Any] | None:
    """What a producer's scheduler side leaves of the completions in update_connector_output, for the scheduler to see.

    `foreign`: an id that it did not announce. `overdue`: an id that it announced, of which nothing was heard.
    """
    module = "moriio.moriio_connector"
    scheduler_class = found("MoRIIOConnectorScheduler", module)
    if not hasattr(scheduler_class, "update_connector_output"):
        return None
    mode = found("MoRIIOMode", "moriio.moriio_common")
    pairs = "deadline, _" in source_of(scheduler_class)
    result: dict[str, Any] = {}
    for name in ("READ", "WRITE"):
        for case, deadlines, sent in (("foreign", {}, {ID}), ("overdue", {ID: (-1.0, None) if pairs else -1.0}, None)):
            scheduler = bare(
                scheduler_class,
                is_producer=True,
                mode=mode[name],
                _deferred_send_deadlines=dict(deadlines),
                _pending_sent_acks={},
                _defer_timeout=60.0,
                unmap_request_id=lambda request_id, transfer_id=None: None,
            )
            output = SimpleNamespace(finished_sending=set(sent) if sent else None, finished_recving=None)
            scheduler.update_connector_output(output)
            result[f"{case}_{name.lower()}"] = sorted(output.finished_sending or ())
    return result
