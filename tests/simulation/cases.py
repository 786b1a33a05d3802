"""Faults that the simulator has found, each cut down to what is needed for it: they must stay away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A plan, the scheduler class, a release on which it went wrong, in which setup, and which invariant it broke."""

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
    Case(
        "one that began on a lost block in the step ahead is aborted before the failure is known",
        "version 3 of failed-loads, losses seed 141",
        "0.29.0",
        "AsyncScheduler",
        "computed on wrong KV",
        _plan(
            "moriio-read",
            [
                {
                    "name": "r5",
                    "arrives": 0,
                    "prompt": 22,
                    "shared": 22,
                    "outputs": 1,
                    "hit": 16,
                    "failing_loads": 1000,
                },
                {"name": "r1", "arrives": 2, "prompt": 27, "shared": 27, "aborted_after": 0, "aborted_in_step": True},
                {"name": "r3", "arrives": 5, "prompt": 37, "shared": 37, "outputs": 1},
            ],
            losses=True,
        ),
    ),
)


def _lost(requests: list[dict[str, Any]], connector: str = "moriio-read", **values: Any) -> dict[str, Any]:
    return _plan(connector, requests, losses=True, blocks=48, **{"reported_by": "blocks", **values})


_FAILS = {"name": "r0", "arrives": 1, "prompt": 24, "outputs": 4, "failing_loads": 1}

LOST = (
    Case(
        "a token that was sampled on lost KV by the step ahead, and a request that computes past its end",
        "stock",
        "0.29.0",
        "AsyncScheduler",
        "wrong answer",
        _lost([{**_FAILS, "hit": 16}]),
    ),
    Case(
        "the client hangs up before the failed load is known, and the next has the same prompt",
        "stock",
        "0.29.0",
        "Scheduler",
        "computed on wrong KV",
        _lost(
            [
                {**_FAILS, "shared": 24, "hit": 16, "aborted_after": 0, "aborted_in_step": True},
                {"name": "r1", "arrives": 4, "prompt": 32, "shared": 24},
            ]
        ),
    ),
    Case(
        "a failed load with several KV groups",
        "stock",
        "0.29.0",
        "Scheduler",
        "engine died",
        _lost([{**_FAILS, "hit": 16}], groups="hybrid"),
    ),
    Case(
        "a load that fails each time it is asked for",
        "stock",
        "0.29.0",
        "Scheduler",
        "never ends",
        _lost([{**_FAILS, "hit": 16, "failing_loads": 1000, "fails_whole": True}], connector="store"),
    ),
    Case(
        "requests without a hit that fill the pool exactly preempt each other for ever (vllm#49674)",
        "stock",
        "0.29.0",
        "AsyncScheduler",
        "never ends",
        _lost(
            [
                {"name": f"r{number}", "arrives": 1, "prompt": prompt, "outputs": 20}
                for number, prompt in enumerate((32, 8, 32, 16, 48, 29))
            ]
        )
        | {"blocks": 22},
    ),
)
"""Faults of stock releases that losses.py draws; our patches mend them."""

LATE_OLDEST = Case(
    "the oldest is let in last, since its lookup is answered late, and stands before what has arrived (docs/loads.md)",
    "stock",
    "0.30.0",
    "Scheduler",
    "load deadlock: the first holds no blocks",
    _plan(
        "store",
        [
            {"name": "r0", "arrives": 1, "prompt": 48, "hit": 40, "looked_up_after": 4},
            *({"name": f"r{number}", "arrives": 1, "prompt": 46, "hit": 40, "outputs": 10} for number in (1, 2)),
        ],
    ),
)
"""What stops releases to 0.30.0; no patch of ours mends it, and it is noted."""
