# mypy: disable-error-code="import-not-found"
"""Drive one release's scheduler through loads that together are more than its pool; print what happened as JSON.

    load_deadlocks.py MIXES LIMIT

MIXES is how many random mixes of each kind to play, LIMIT the steps after which a world counts as one that never ends.
See fenced_world.py for what is real and what is stood in for. The connector answers as others do: for a part of the prompt
(LMCache, OffloadingConnector), for the whole of it and once (NIXL, Mooncake on a decode engine), at once or first with None.
"""

from __future__ import annotations

from result import begin_driver, print_result

begin_driver()

import gc
import random
import sys
from collections.abc import Callable
from typing import Any

import real_scheduler as real
import vllm
from fenced_world import BLOCK, Plan, World, play, prompt

gc.enable()

real.NUM_BLOCKS = 100
"""One of them is never given out."""
Made = tuple[list[Plan], dict[str, Any]]
"""A world's requests, and what else World is made with."""


def blocks(name: str, count: int, hit: int = 0, **more: Any) -> Plan:
    """A request of whole blocks, the first `hit` of which are elsewhere."""
    return Plan(name, prompt(name, count * BLOCK), hit=hit * BLOCK, **{"outputs": 4, **more})


def parts_at_once() -> Made:
    """Equal in size, most of each elsewhere: the loads fit together, what they leave to compute does not."""
    return [blocks(f"part{n}", 30, 24) for n in range(8)], {}


def small_first_turn() -> Made:
    """A long prompt that runs in parts, beside loads that take what it still needs."""
    return [blocks("first", 60, 8), *(blocks(f"large{n}", 60, 48) for n in range(4))], {}


def whole_prompts() -> Made:
    """A decode engine: all of each prompt arrives, and fills the pool."""
    return [blocks(f"whole{n}", 33, 33, once=True) for n in range(6)], {}


def whole_prompts_speculative() -> Made:
    """The same with speculative decoding, which wants a slot more than the load."""
    plans, _ = whole_prompts()
    return plans, {"lookahead": 1}


def late_oldest() -> Made:
    """The oldest is let in last, since its lookup is answered late, and stands before what has arrived meanwhile."""
    return [blocks("oldest", 40, 36, unanswered=4), *(blocks(f"young{n}", 45, 40) for n in range(4))], {}


def late_oldest_without_a_hit() -> Made:
    """The same where nothing of the oldest is found after all."""
    return [blocks("oldest", 70, 0, unanswered=4), *(blocks(f"young{n}", 45, 45, once=True) for n in range(2))], {}


def urgent_newcomer() -> Made:
    """One of a higher priority arrives while others load, and does not fit beside them."""
    plans = [blocks(f"loads{n}", 45, 40, priority=1, loading=6) for n in range(2)]
    return [*plans, blocks("urgent", 70, arrives=3)], {"options": {"policy": "priority"}}


def mix(seed: int, **more: Any) -> list[Plan]:
    """Requests of any size, of which any part is elsewhere, answered at once or later."""
    dice = random.Random(seed)
    plans = []
    for number in range(dice.randint(5, 12)):
        count = dice.choice([4, 12, 30, 45, 60, 85])
        hit = dice.choice([0, count, count, dice.randint(0, count)])
        plan = blocks(f"mix{seed}.{number}", count, hit, once=dice.random() < 0.3, **more)
        plan.unanswered = dice.choice([0, 0, 1, dice.randint(0, 12)])
        plan.arrives = dice.choice([0, 0, dice.randint(0, 30)])
        plan.loading = dice.randint(1, 5)
        plan.priority = dice.randint(0, 2)
        plans.append(plan)
    return plans


SHAPES: tuple[Callable[[], Made], ...] = (
    parts_at_once, small_first_turn, whole_prompts, whole_prompts_speculative, late_oldest, late_oldest_without_a_hit,
    urgent_newcomer,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "mix": {},
    "speculative mix": {"lookahead": 3},
    "mix of priorities": {"options": {"policy": "priority"}},
}


def main() -> None:
    """Play all worlds with both schedulers."""
    mixes, limit = int(sys.argv[1]), int(sys.argv[2])

    def play_all(mode: str, model_config: Any) -> dict[str, Any]:
        made = {shape.__name__: shape() for shape in SHAPES}
        made |= {f"{kind} {seed}": (mix(seed), more) for kind, more in KINDS.items() for seed in range(mixes)}
        return {name: play(World(mode, model_config, plans, **more), limit) for name, (plans, more) in made.items()}

    print_result({"worlds": real.with_each_scheduler(play_all)}, vllm)


if __name__ == "__main__":
    main()
