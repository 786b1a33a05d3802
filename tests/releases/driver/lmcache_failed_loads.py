# mypy: disable-error-code="import-not-found"
"""Let one LMCache's real worker adapter load what its server cannot give; print what the engine is told, as JSON.

The adapter's own `submit_retrieve_request` and `get_finished` run, and the real connector that the engine asks. The server is
a double: it writes into the blocks of a load, or refuses it, when the case lets it. Blocks have contents: what is told of
a load is wrong where a block that it did not fill is not named as failed.
"""

from __future__ import annotations

from result import all_attempted, begin_driver, print_result

begin_driver()

import importlib
import inspect
import logging
import sys
from types import SimpleNamespace
from typing import Any

import native_double

native_double.stand_in()

import lmcache
from completion_lmcache import unhealthy, working_adapter
from completion_world import V1, bare
from lmcache_operations import operation

native_double.device_ops(lmcache)
MODULE = importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
SOURCE = inspect.getsource(MODULE)
OLD = "of another request"


def connector_class() -> type:
    """LMCache's own connector, from 0.4.5 on; before, vLLM's."""
    try:
        module = importlib.import_module("lmcache.integration.vllm.lmcache_mp_connector")
    except ModuleNotFoundError:
        # Imported beside the adapter that is needed, it wants names of LMCache's that are gone; nothing of it runs here.
        other = f"{V1}.lmcache_integration.vllm_v1_adapter"
        sys.modules[other] = native_double.NativeDouble(other)
        module = importlib.import_module(f"{V1}.lmcache_mp_connector")
    return module.LMCacheMPConnector  # type: ignore[no-any-return]


class Load:
    """A load that the server carries out, and its future: it ends when told to, well or not."""

    def __init__(self, slots: dict[int, str], name: str, blocks: list[int]) -> None:
        self.slots, self.name, self.blocks = slots, name, blocks
        self.succeeded: bool | None = None

    def to_cuda_future(self) -> Load:
        return self

    def query(self) -> bool:
        return self.succeeded is not None

    def result(self, timeout: float | None = None) -> bool:
        assert self.succeeded is not None, "an engine's step waits for a load that is under way"
        return self.succeeded

    def end(self, succeeded: bool) -> None:
        self.succeeded = succeeded
        if succeeded:
            self.slots.update(dict.fromkeys(self.blocks, self.name))


class World:
    """A worker's connector and adapter, 16 blocks that hold another request's KV, and the loads that have begun."""

    def __init__(self) -> None:
        self.slots = dict.fromkeys(range(16), OLD)
        self.loads: dict[str, Load] = {}
        self.asked: dict[str, list[int]] = {}
        blocks = {"_block_ids_per_group": lambda operation: [getattr(operation, "flat_block_ids", operation.block_ids)]}
        self.adapter = working_adapter(MODULE, self._begin, **blocks)
        for name in ("error_block_ids", "_dropped_retrieves"):  # from 0.4.2 on, and from 0.5.0 on
            if name not in SOURCE:
                delattr(self.adapter, name)
        given = {"lazy_offload": False, "_can_store": True, "_report_request_errors": False}
        self.connector = bare(connector_class(), worker_adapter=self.adapter, **given)

    def _begin(self, *args: Any, **kwargs: Any) -> Load:
        name = next(reversed(self.asked))
        self.loads[name] = Load(self.slots, name, self.asked[name])
        return self.loads[name]

    def load(self, name: str, *blocks: int, named: bool = False) -> None:
        """As the connector asks for it, or with arguments by name."""
        self.asked.pop(name, None)
        self.asked[name] = list(blocks)
        asked = operation(MODULE, [1], blocks)
        event = SimpleNamespace(ipc_handle=lambda: b"")
        if named:
            self.adapter.submit_retrieve_request(request_id=name, op=asked, event=event)
        else:
            self.adapter.batched_submit_retrieve_requests([name], [asked], event)

    def failed(self) -> set[int]:
        """The blocks that are told to have failed."""
        told: set[int] = self.connector.get_block_ids_with_load_errors()
        return told

    def reported(self, *ids: str) -> list[Any]:
        """What the engine is told in a step: the loads that have ended, the blocks that failed; and what is wrong.

        Wrong are the blocks of ended loads that it takes for loaded, and that hold another request's KV. `ids` are
        requests whose end the engine tells; those that are reported as sent stand behind a slash.
        """
        sent, ended = self.connector.get_finished(set(ids))
        failed = self.failed()
        wrong = [
            block
            for name in ended or ()
            for block in self.asked[name]
            if block not in failed and self.slots[block] != name
        ]
        names = "".join(sorted(ended or ())) + "".join(f"/{name}" for name in sorted(sent or ()))
        return [names, sorted(failed), sorted(wrong)]


def succeeds() -> list[Any]:
    world = World()
    world.load("a", 1, 2)
    world.loads["a"].end(True)
    return [world.reported(), world.reported()]


def fails() -> list[Any]:
    world = World()
    world.load("a", 1, 2)
    world.loads["a"].end(False)
    return [world.reported(), world.reported()]


def fails_later() -> list[Any]:
    """It is under way for a step."""
    world = World()
    world.load("a", 1, 2, named=True)
    steps = [world.reported()]
    world.loads["a"].end(False)
    return [*steps, world.reported(), world.reported()]


def fails_beside_others() -> list[Any]:
    """Of three loads one succeeds, one fails, and one is under way for a step, and then succeeds."""
    world = World()
    for number, name in enumerate("abc"):
        world.load(name, 2 * number, 2 * number + 1)
    world.loads["a"].end(True)
    world.loads["b"].end(False)
    steps = [world.reported()]
    world.loads["c"].end(True)
    return [*steps, world.reported()]


def fails_and_again() -> list[Any]:
    """The same request's next load, to other blocks, succeeds."""
    world = World()
    world.load("a", 1, 2)
    world.loads.pop("a").end(False)
    steps = [world.reported()]
    world.load("a", 3, 4)
    world.loads["a"].end(True)
    return [*steps, world.reported()]


def server_gone() -> list[Any]:
    """Two loads are under way when the server is found gone; one of them had failed before."""
    world = World()
    if not hasattr(MODULE, "HeartbeatThread"):  # to 0.4.1 nobody looks
        return []
    world.load("a", 1, 2)
    world.load("b", 3, 4)
    world.loads["b"].end(False)
    unhealthy(world.adapter)
    return [world.reported(), world.reported()]


def refused() -> list[Any]:
    """The server is gone when a load is to begin, beside one that is under way, and back for the next one."""
    world = World()
    if not hasattr(MODULE, "HeartbeatThread"):
        return []
    world.load("c", 5, 6)
    unhealthy(world.adapter)
    world.load("a", 1, 2)
    steps = [world.reported("s"), world.reported()]
    world.adapter._health_event.set()
    world.load("b", 3, 4)
    world.loads["b"].end(True)
    return [*steps, world.reported()]


def lazily() -> list[Any]:
    """A load fails where stores wait in the scheduler, from 0.5.4 on."""
    world = World()
    if not hasattr(world.adapter, "get_finished_with_lazy_offload"):
        return []
    world.adapter.lazy_offload = world.connector.lazy_offload = True
    world.load("a", 1, 2)
    world.loads["a"].end(False)
    return [world.reported(), world.reported()]


CASES: dict[str, Any] = {
    "succeeds": succeeds,
    "fails": fails,
    "fails_later": fails_later,
    "fails_beside_others": fails_beside_others,
    "fails_and_again": fails_and_again,
    "server_gone": server_gone,
    "refused": refused,
    "lazily": lazily,
}


def played() -> dict[str, Any]:
    """What each case came to."""
    logging.disable(logging.CRITICAL)
    return all_attempted(CASES)


def main() -> None:
    vllm = importlib.import_module("vllm")
    print_result({"cases": played()}, lmcache, vllm)


if __name__ == "__main__":
    main()
