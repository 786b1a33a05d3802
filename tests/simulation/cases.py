"""Faults that the simulator has found, each cut down to what is needed for it: they must stay away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A plan, the scheduler class, a release on which it went wrong, in which arm, and which invariant it broke."""

    name: str
    found_in: str
    release: str
    mode: str
    breaks: str
    plan: dict[str, Any]


def _plan(connector: str, requests: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    given = {"blocks": 14, "groups": "full", "budget": 256, "policy": "recompute", "late": False, **values}
    return {"seed": 0, "connector": connector, "requests": requests, **given}


CASES = (
    Case(
        "an aborted load whose empty send is reported at once",
        "0.1.0",
        "0.29.0",
        "Scheduler",
        "freed while being loaded",
        _plan(
            "lmcache",
            [{"name": "r0", "arrives": 1, "prompt": 24, "hit": 24, "load_steps": 9, "aborted_after": 2}],
        ),
    ),
    Case(
        "a child of a MultiConnector that ends before the other's load",
        "0.1.0",
        "0.33.0",
        "AsyncScheduler",
        "freed while being loaded",
        _plan(
            "multi",
            [{"name": "r0", "arrives": 1, "prompt": 24, "hit": 24, "load_steps": 9, "aborted_after": 2}],
        ),
    ),
    Case(
        "a second word of a receive while the blocks are sent",
        "0.1.0",
        "0.21.0",
        "Scheduler",
        "freed while being sent",
        _plan(
            "nixl",
            [
                {"name": "r0", "arrives": 1, "prompt": 24, "hit": 16, "load_steps": 1, "outputs": 1, "sends": True}
                | {"send_delay": 4, "send_steps": 9}
            ],
            lies=[{"step": step, "kind": "recving", "about": "r0"} for step in range(6, 12)],
        ),
    ),
    Case(
        "an id that is used again after an empty send that was never reported",
        "the first bundle that holds for both transfers",
        "0.29.0",
        "Scheduler",
        "left behind",
        _plan(
            "lmcache",
            [
                {"name": "r0", "arrives": 1, "prompt": 24, "hit": 24, "aborted_after": 2, "empty_send_silent": True},
                {"name": "r0", "arrives": 12, "prompt": 24, "outputs": 2},
            ],
        ),
    ),
    Case(
        "the word of an empty send comes when the next request of its id has just ended",
        "10,000 worlds of 0.1.1, seed 2231",
        "0.32.0",
        "Scheduler",
        "freed while being sent",
        _plan(
            "lmcache",
            [
                {"name": "r0", "arrives": 1, "prompt": 47, "hit": 47, "failing_loads": 1},
                {"name": "r0", "arrives": 4, "prompt": 26, "outputs": 1, "sends": True, "send_steps": 9},
            ],
            policy="fail",
            blocks=48,
        ),
    ),
    Case(
        "the word of an empty send is on its way with a step when the next request of its id is aborted",
        "10,000 worlds of 0.1.1, seed 821",
        "0.16.0",
        "AsyncScheduler",
        "freed while being sent",
        _plan(
            "multi",
            [
                {
                    "name": "r0",
                    "arrives": 6,
                    "prompt": 21,
                    "outputs": 1,
                    "hit": 21,
                    "load_steps": 4,
                    "failing_loads": 2,
                },
                {"name": "r0", "arrives": 12, "prompt": 26, "outputs": 1, "send_steps": 1, "aborted_after": 1},
            ],
            policy="fail",
            blocks=48,
        ),
    ),
)
