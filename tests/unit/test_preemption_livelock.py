"""Who is left alone, and what is given back after an error. What needs a scheduler is in tests/releases.

The classes here stand in for the release's: a pool that is empty, and the shape of its retry loop.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.preemption_livelock import wrappers as patch
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext

NAME = "preemption-livelock"
IN_FLIGHT, PROCESSED = 7, 6


class Scheduler:
    """Four requests run, each with a step in flight, and no block is free."""

    def __init__(self, policy: str = "FCFS", fenced: bool = True) -> None:
        self.policy = SimpleNamespace(name=policy)
        self.defer_block_free = fenced
        self.processed_step_seq = PROCESSED
        self.kv_cache_manager = SimpleNamespace(allocate_slots=lambda request, tokens: None)
        self.running = [request(number) for number in range(4)]
        self.preempted: list[Any] = []

    def schedule(self) -> None:
        """Preempt for the first request until there are blocks or it is preempted itself."""
        first = self.running[0]
        while self.kv_cache_manager.allocate_slots(first, 1) is None:
            victim = self.running.pop()
            self._preempt_request(victim, 0.0)
            if victim is first:
                return

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        self.preempted.append(request)


def request(number: int, last_sched_seq: int = IN_FLIGHT, status: str = "RUNNING") -> Any:
    return SimpleNamespace(
        number=number,
        priority=0,
        arrival_time=float(number),
        last_sched_seq=last_sched_seq,
        status=SimpleNamespace(name=status),
    )


def patched(kind: type[Scheduler], context: PatchContext, **made_with: Any) -> Scheduler:
    """One of a class whose methods are wrapped as in a process."""
    own = {"__module__": patch.MODULE, "schedule": kind.schedule}
    for target, wrapper in patch.wrappers(context).items():
        name = target.rpartition(".")[2]
        own[name] = guard.in_place_of(vars(Scheduler)[name], wrapper, context, target)
    return type(kind.__name__, (kind,), own)(**made_with)  # type: ignore[no-any-return]


@pytest.fixture
def context() -> PatchContext:
    return PatchContext(NAME, {}, {}, lambda: None)


def numbers(requests: list[Any]) -> list[int]:
    return [one.number for one in requests]


def test_nobody_is_preempted_whose_blocks_would_be_fenced(context: PatchContext) -> None:
    scheduler = patched(Scheduler, context)
    scheduler.schedule()
    assert (numbers(scheduler.running), scheduler.preempted) == ([0, 1, 2, 3], [])
    assert context.counters == {"waited": 1}
    scheduler.processed_step_seq = IN_FLIGHT
    scheduler.schedule()
    assert numbers(scheduler.preempted) == [3, 2, 1, 0]  # in this stand-in no block ever comes back


def test_victims_are_preempted_as_long_as_their_blocks_are_free_at_once(context: PatchContext) -> None:
    scheduler = patched(Scheduler, context)
    scheduler.running[3].last_sched_seq = PROCESSED
    scheduler.schedule()
    assert (numbers(scheduler.running), numbers(scheduler.preempted)) == ([0, 1, 2], [3])


@pytest.mark.parametrize("last", [{"priority": 1}, {"arrival_time": 9.0}], ids=lambda last: next(iter(last)))
def test_the_victim_is_the_one_of_the_schedulers_policy(last: dict[str, Any], context: PatchContext) -> None:
    scheduler = patched(Scheduler, context, policy="PRIORITY")
    vars(scheduler.running[1]).update(last)
    scheduler.running[1].last_sched_seq = PROCESSED
    scheduler.kv_cache_manager.allocate_slots(scheduler.running[0], 1)
    assert context.counters == {}


def test_what_is_to_be_admitted_preempts_nobody(context: PatchContext) -> None:
    scheduler = patched(Scheduler, context)
    running = scheduler.running
    scheduler.kv_cache_manager.allocate_slots(request(9, status="WAITING"), 1)
    assert scheduler.running is running


def test_without_fences_the_pool_is_the_releases_own(context: PatchContext) -> None:
    scheduler = patched(Scheduler, context, fenced=False)
    assert vars(scheduler.kv_cache_manager)["allocate_slots"].__module__ == __name__
    scheduler.schedule()
    assert numbers(scheduler.preempted) == [3, 2, 1, 0]


def test_a_scheduler_with_a_loop_of_its_own_is_left_alone(context: PatchContext) -> None:
    class Other(Scheduler):
        def schedule(self) -> None:
            super().schedule()

    made = patched(Scheduler, context)
    other = type("Other", (type(made),), {"__module__": "elsewhere", "schedule": Other.schedule})()
    assert context.counters == {"other_scheduler": 1}
    assert vars(other.kv_cache_manager)["allocate_slots"].__module__ == __name__


def test_an_error_of_its_own_leaves_the_release_to_preempt(context: PatchContext) -> None:
    scheduler = patched(Scheduler, context)
    del scheduler.running[3].last_sched_seq
    scheduler.schedule()
    assert numbers(scheduler.preempted) == [3, 2, 1, 0]
    assert context.aside
    assert context.counters == {}


def test_those_that_are_spared_come_back_where_the_patch_stands_aside_meanwhile(context: PatchContext) -> None:
    scheduler = patched(Scheduler, context)
    first = scheduler.running[0]
    assert scheduler.kv_cache_manager.allocate_slots(first, 1) is None
    context.withdraw()
    assert scheduler.running.pop() is first
    scheduler._preempt_request(first, 0.0)
    assert (numbers(scheduler.running), scheduler.preempted) == ([0, 1, 2, 3], [])
    scheduler.schedule()
    assert numbers(scheduler.preempted) == [3, 2, 1, 0]
