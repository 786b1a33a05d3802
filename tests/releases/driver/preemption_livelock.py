# mypy: disable-error-code="import-not-found"
"""Drive one release's scheduler through requests that fill its pool; print what happened as one JSON object.

    preemption_livelock.py MIXES LIMIT

MIXES is how many random mixes to play, LIMIT the steps after which a world counts as one that never ends. See
fenced_world.py for what is real and what is stood in for.
"""

from __future__ import annotations

from result import begin_driver, print_result

begin_driver()

import gc
import random
import sys
from collections.abc import Iterator
from typing import Any

import real_scheduler as real
import vllm
from fenced_world import BLOCK, Plan, World, play, prompt

gc.enable()

real.NUM_BLOCKS = 101
"""One of them is never given out."""
SIZES = (440, 837, 101, 180)
PRIORITY = {"policy": "priority"}


def as_reported(hit: int = 0) -> list[Plan]:
    """The requests of the issue: together they fill the pool, and each grows."""
    return [Plan(f"r{size}", prompt(f"r{size}", size), hit=hit) for size in SIZES]


def shared_prefix() -> list[Plan]:
    """All begin with the same six blocks; two come again when the first have left blocks in the cache."""
    first = prompt("shared", 6 * BLOCK)
    sizes = [*((size, 0) for size in (*SIZES, 383)), (440, 60), (837, 60)]
    return [
        Plan(f"r{size}.{when}", first + prompt(f"r{size}", size - len(first)), arrives=when) for size, when in sizes
    ]


def left_amid_steps() -> list[Plan]:
    """There is room for all; the clients of two hang up while a step of theirs is under way."""
    plans = [Plan(f"r{size}", prompt(f"r{size}", size)) for size in (*SIZES[2:], 60)]
    plans[0].leaves, plans[1].leaves = 5, 6
    return plans


def by_priority(*priorities: int) -> list[Plan]:
    """Those of the issue, with a priority each; the larger number is preempted first."""
    plans = as_reported()
    for plan, priority in zip(plans, priorities, strict=True):
        plan.priority = priority
    return plans


def mix(seed: int) -> list[Plan]:
    """Requests of any size that fill the pool exactly, and some that come later; some load their first blocks."""
    dice, left, plans = random.Random(seed), real.NUM_BLOCKS - 1, []
    while left > 0 or dice.random() < 0.7:
        count = dice.choice([3, 7, 12, 28, 53])
        count = min(count, left) if left > 0 else count
        plan = Plan(
            f"mix{seed}.{len(plans)}",
            prompt(f"mix{seed}.{len(plans)}", count * BLOCK - dice.choice([0, 0, dice.randint(1, 12)])),
            outputs=dice.choice([4, 40, 90]),
            arrives=0 if left > 0 else dice.randint(0, 60),
            hit=dice.choice([0, 0, 2 * BLOCK]) if count > 2 else 0,
            loading=dice.randint(1, 4),
            priority=dice.randint(0, 2),
        )
        plans.append(plan)
        left -= count
    return plans


def worlds(mixes: int) -> Iterator[tuple[str, list[Plan], dict[str, Any]]]:
    """Each world's name, its requests, and options of its scheduler's configuration."""
    yield "as reported", as_reported(), {}
    yield "loads", as_reported(hit=32), {}
    yield "shared prefix", shared_prefix(), {}
    yield "clients leave", left_amid_steps(), {}
    yield "priorities", by_priority(0, 1, 2, 3), PRIORITY
    yield "the first has the least priority", by_priority(3, 0, 2, 1), PRIORITY
    for seed in range(mixes):
        yield f"mix {seed}", mix(seed), PRIORITY if seed % 2 else {}


def played(mixes: int, limit: int) -> dict[str, Any]:
    """What all worlds came to with both schedulers."""

    def play_all(mode: str, model_config: Any) -> dict[str, Any]:
        made = worlds(mixes)
        return {name: play(World(mode, model_config, plans, options), limit) for name, plans, options in made}

    return real.with_each_scheduler(play_all)


def main() -> None:
    """Play all worlds, and print what they came to."""
    print_result({"worlds": played(int(sys.argv[1]), int(sys.argv[2]))}, vllm)


if __name__ == "__main__":
    main()
