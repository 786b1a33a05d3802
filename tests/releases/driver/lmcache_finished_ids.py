# mypy: disable-error-code="import-not-found"
"""Let one LMCache's real worker adapter begin stores and hear of requests' ends; print what it reports, as JSON.

The adapter's own `submit_store_request` and `get_finished` run. Its server is a double: what it is sent for a store is a
future that ends when the case lets it end.
"""

from __future__ import annotations

from result import all_attempted, begin_driver, print_result

begin_driver()

import importlib
import logging
import weakref
from typing import Any
from unittest.mock import MagicMock

import native_double

native_double.stand_in()

import lmcache
from completion_lmcache import QueueFuture, unhealthy, working_adapter
from completion_world import ID, reported
from lmcache_operations import operation

native_double.device_ops(lmcache)
MODULE = importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
REQUESTS = 2000
LONG_PROMPT = 5_000
"""Stores of one prompt that are under way at once: more than Python nests calls."""


class Store(QueueFuture):
    """A store that the server carries out: it ends when told to, well or not."""

    succeeds = True
    asked = 0

    def query(self) -> bool:
        self.asked += 1
        return super().query()

    def to_cuda_future(self) -> Store:
        return self

    def result(self, timeout: float | None = None) -> bool:
        return self.succeeds


class Event:
    """A device's event: it is of use to others as long as it is kept."""

    def ipc_handle(self) -> bytes:
        return b""


class World:
    """A worker's adapter, and the stores that it has begun, in order."""

    def __init__(self) -> None:
        self.begun: list[Store] = []
        self.events: list[weakref.ref[Event]] = []
        self.adapter = working_adapter(MODULE, self._begin)

    def _begin(self, *args: Any) -> Store:
        self.begun.append(Store())
        return self.begun[-1]

    def store(self) -> None:
        event = Event()
        self.events.append(weakref.ref(event))
        self.adapter.submit_store_request(ID, operation(MODULE, [1], [1]), event)

    def reported(self, *ids: str) -> str:
        """What is reported in a step that tells of these requests' ends."""
        return reported(self.adapter.get_finished(set(ids)))


def used_again() -> list[str]:
    """A request ends, and another with its id, which the engine may name as soon as the first is gone."""
    world = World()
    return [world.reported(*ids) for ids in ([ID], [ID], [], [ID], [])]


def used_again_with_stores() -> list[str]:
    """Each is reported when its own store has ended."""
    world = World()
    reports = []
    for _ in range(2):
        world.store()
        reports.append(world.reported(ID))
        world.begun[-1].done = True
        reports += [world.reported(), world.reported()]
    return reports


def remembered() -> int:
    """How many ids are kept in the step after requests have all been reported."""
    world = World()
    for number in range(REQUESTS):
        world.adapter.get_finished({f"request {number}"})
    world.reported()
    return sum(len(kept) for kept in vars(world.adapter).values() if isinstance(kept, set | dict))


def stores(count: int, *order: int) -> list[str]:
    """So many stores of a request are under way when it ends; they end in this order."""
    world = World()
    for _ in range(count):
        world.store()
    reports = [world.reported(ID)]
    for number in order:
        world.begun[number].done = True
        reports.append(world.reported())
    return [*reports, world.reported()]


def store_after_another() -> list[str]:
    """A store has ended, another is under way, and the request ends."""
    world = World()
    world.store()
    world.begun[0].done = True
    reports = [world.reported()]
    world.store()
    reports.append(world.reported(ID))
    world.begun[1].done = True
    return [*reports, world.reported(), world.reported()]


def one_fails() -> list[Any]:
    """Of two stores the first fails: it is logged when both have ended."""
    world = World()
    MODULE.logger = MagicMock()
    world.store()
    world.store()
    world.begun[0].succeeds = False
    for store in world.begun:
        store.done = True
    return [world.reported(ID), world.reported(), MODULE.logger.error.call_count]


def raises() -> list[str]:
    """Of two stores the first ends with an error, which the release never asks for."""

    def result(timeout: float | None = None) -> bool:
        raise RuntimeError("the server's handler raised")

    world = World()
    world.store()
    world.store()
    world.begun[0].result = result  # type: ignore[method-assign]
    for store in world.begun:
        store.done = True
    return [world.reported(ID), world.reported()]


def long_prompt() -> list[str]:
    """All stores of a long prompt are under way when the request ends; they end in order."""
    world = World()
    for _ in range(LONG_PROMPT):
        world.store()
        world.reported()
    reports = [world.reported(ID)]
    for store in world.begun[:-1]:
        store.done = True
    reports.append(world.reported())
    world.begun[-1].done = True
    return [*reports, world.reported(), world.reported()]


def asked_for_a_long_prompt() -> float:
    """How often a store's future is asked for each step, where each store ends three steps later."""
    world = World()
    for step in range(LONG_PROMPT):
        world.store()
        if step >= 3:
            world.begun[step - 3].done = True
        world.reported()
    return round(sum(store.asked for store in world.begun) / LONG_PROMPT, 1)


def server_gone() -> list[str]:
    """Two stores are under way when the server is found gone: all is given up, by LMCache's own decision."""
    world = World()
    world.store()
    world.store()
    if not hasattr(MODULE, "HeartbeatThread"):  # to 0.4.1 nobody looks
        return ["", "S"]
    unhealthy(world.adapter)
    return [world.reported(), world.reported(ID)]


def events() -> list[bool]:
    """Which of two events are kept while their stores are under way, where the adapter keeps any."""
    world = World()
    world.store()
    world.store()
    return [made() is not None for made in world.events] if world.adapter.store_events else [True, True]


CASES: dict[str, Any] = {
    "used_again": used_again,
    "used_again_with_stores": used_again_with_stores,
    "remembered": remembered,
    "first_then_second": lambda: stores(2, 0, 1),
    "second_then_first": lambda: stores(2, 1, 0),
    "three": lambda: stores(3, 0, 2, 1),
    "one": lambda: stores(1, 0),
    "store_after_another": store_after_another,
    "one_fails": one_fails,
    "raises": raises,
    "long_prompt": long_prompt,
    "asked_for_a_long_prompt": asked_for_a_long_prompt,
    "server_gone": server_gone,
    "events": events,
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
