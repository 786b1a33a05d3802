"""A failing plan is cut down while it still breaks the same invariant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.simulation.plan import Plan, draw, smaller

MOST_ROUNDS = 60


def shrink(plan: Plan, fails: Callable[[Sequence[Plan]], Sequence[bool]]) -> Plan:
    """The smallest plan found that still `fails`, which is asked for many plans at once."""
    for _ in range(MOST_ROUNDS):
        candidates = smaller(plan)
        if not candidates:
            return plan
        failing = [each for each, failed in zip(candidates, fails(candidates), strict=True) if failed]
        if not failing:
            return plan
        plan = failing[0]
    return plan


def kinds(world: dict[str, Any]) -> set[str]:
    """The invariants that a world broke."""
    return {fault["kind"] for fault in world["faults"]}


__all__ = ["Plan", "draw", "kinds", "shrink", "smaller"]
