# mypy: disable-error-code="import-not-found"
"""Worlds in which `chunked-lmcache-load` must let in what the release lets in, and give way; print what they came to.

    chunked_load_cases.py CONNECTOR CASE...

CONNECTOR is `builtin` or `lmcache`; each CASE is the name of a function here. See chunked_lmcache_load.py.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chunked_lmcache_load as base
import lmcache
import real_scheduler as real
import vllm
from chunked_lmcache_load import tokens
from paged_world import BLOCK, CHUNK, STEP_TOKENS, Plan, World
from result import outcome_of, print_result

Made = tuple[str, list[Plan], dict[str, Any]]
"""A world's name, its requests, and what else World is made with."""

MIXES = 4
SMALL_STEPS = {"max_num_batched_tokens": STEP_TOKENS}
"""What a sliding-window group holds at most is the window and one step's tokens."""
HALF_STEPS = {"max_num_batched_tokens": STEP_TOKENS // 2}
"""For releases that count a step for each batch in flight, and a pool of this size."""


def hybrid() -> Iterator[Made]:
    """One group of full attention and three with a sliding window; four requests with hits."""
    plans = [Plan(f"hybrid{n}", tokens(f"hybrid{n}", 24), hit=20 * BLOCK, outputs=20) for n in range(4)]
    yield "four requests", plans, {"windows": (32, 32, 32)}
    plans = [Plan(f"long{n}", tokens(f"long{n}", 36), hit=4 * BLOCK, outputs=20) for n in range(4)]
    yield "much to compute", plans, {"windows": (32,), "options": {"max_num_batched_tokens": 4 * BLOCK}}


def hybrid_mixes() -> Iterator[Made]:
    """Late lookups and random sizes where a second group has a sliding window, and gives blocks back as it moves on."""
    oldest = Plan("oldest", tokens("oldest", 32), hit=28 * BLOCK, answered_after=4)
    young = [Plan(f"young{n}", tokens(f"young{n}", 45), hit=8 * BLOCK) for n in range(4)]
    # With half the step, the longest fits into the pool by every release's count: see `alone`.
    for steps, options in ("", SMALL_STEPS), (", half steps", HALF_STEPS):
        yield f"head of line{steps}", [oldest, *young], {"windows": (64,), "options": options}
        for seed in range(MIXES):
            plans = base.mix(seed, faults=False)
            for plan in plans:
                plan.prompt = plan.prompt[: 55 * BLOCK]
                plan.hit = min(plan.hit, len(plan.prompt) // CHUNK * CHUNK)
            yield f"mix{seed}{steps}", plans, {"windows": (64,), "options": options, "seed": seed}


def alone() -> Iterator[Made]:
    """One request as long as the longest of `hybrid_mixes`, of which LMCache holds nothing, in an empty pool."""
    for steps, options in ("", SMALL_STEPS), (", half steps", HALF_STEPS):
        yield f"longest{steps}", [Plan("longest", tokens("longest", 55))], {"windows": (64,), "options": options}


def shared() -> Iterator[Made]:
    """A long prefix that is in the pool already, and clients that each add a little of which LMCache holds some."""
    prefix = tokens("prefix", 60)
    plans = [Plan("first", prefix, outputs=200)]
    for n in range(4):
        prompt = prefix + tokens(f"shared{n}", 8)
        plans.append(Plan(f"shared{n}", prompt, hit=64 * BLOCK, arrives=5, outputs=20))
    yield "prefix", plans, {}


def adapters() -> Iterator[Made]:
    """One adapter at a time: what arrives when another's has begun to run waits long, and must stop nobody else."""
    loading = Plan("loading", tokens("loading", 16), hit=12 * BLOCK, adapter=2)
    running = Plan("running", tokens("running", 4), outputs=100, arrives=1, adapter=1)
    later = [
        Plan(f"later{n}", tokens(f"later{n}", 8), hit=n % 2 * 4 * BLOCK, arrives=20, adapter=n // 2) for n in range(4)
    ]
    yield "max_loras", [loading, running, *later], {"adapters": 1}


def limits() -> Iterator[Made]:
    """Random mixes where something other than blocks keeps requests from running."""
    for seed in range(MIXES):
        for name, made in (
            ("seats", {"options": {"max_num_seqs": 2}}),
            ("adapters", {"adapters": 1}),
            ("priorities", {"options": {"policy": "priority"}}),
        ):
            plans, dice = base.mix(seed, faults=seed % 2 == 1), random.Random(seed)
            for plan in plans:
                plan.adapter = dice.randint(0, 2) if name == "adapters" else 0
                plan.priority = dice.randint(0, 2) if name == "priorities" else 0
            yield f"{name}{seed}", plans, {"seed": seed, **made}


def watermark() -> Iterator[Made]:
    """The scheduler keeps blocks free that the patch does not know of, so what should fit sometimes does not."""
    for seed in range(3 * MIXES):
        yield f"watermark{seed}", base.mix(seed, faults=False), {"seed": seed, "options": {"watermark": 0.3}}


def later_parts() -> Iterator[Made]:
    """A part that is not the first fails, or its client goes; then the same prompt again, from the pool and otherwise."""
    prompt = tokens("parts", 52)
    others = [Plan(f"other{n}", tokens(f"other{n}", 24), hit=20 * BLOCK, arrives=8 + 4 * n) for n in range(4)]
    again = Plan("again", prompt + tokens("more", 2), arrives=60)
    for before in (0, 1, 2):
        fails = Plan("fails", prompt, hit=48 * BLOCK, failing_loads=1, loads_before=before)
        for recomputes in (True, False):
            made = {"recomputes": recomputes}
            yield f"part {before} fails, recomputes={recomputes}", [fails, *others, again], made
    for after in range(2, 20):
        gone = Plan("gone", prompt, hit=48 * BLOCK, aborted_after=after)
        yield f"gone after {after}", [gone, *others, again], {"seed": after}
    for step in (6, 12, 18, 30):
        plans = [Plan("loads", prompt, hit=48 * BLOCK, arrives=4), Plan("runs", tokens("runs", 8), outputs=60), *others]
        yield f"reset at {step}", [*plans, again], {"resets": (step,)}


def stored() -> Iterator[Made]:
    """Many prompts at once of which LMCache holds nearly all, and a pool of four of them."""
    for after in (0, 2):
        plans = [
            Plan(f"stored{n}", tokens(f"stored{n}", 22), hit=20 * BLOCK, answered_after=after, outputs=8 + n % 4 * 8)
            for n in range(32)
        ]
        yield f"lookups after {after}", plans, {}


def count_anew(world: World) -> None:
    """What the patch keeps count of within a step must be what a count of all comes to, each time that it is asked for."""
    scheduler, loads = world.scheduler, world.scheduler._livepatch_loads
    kept = loads.begun

    def begun() -> int:
        running = [other for other in scheduler.running if other.num_computed_tokens < other.num_prompt_tokens]
        all_begun = {other.request_id: other for other in [*(load.request for load in loads.loads.values()), *running]}
        found: int = kept()
        if found != sum(loads.needed(other, 0, other.num_computed_tokens) for other in all_begun.values()):
            world.wrong.add("a wrong count of what is needed")
        return found

    loads.begun = begun


def play(world: World) -> dict[str, Any]:
    """Run one world; return what it came to and its figures."""
    asked = Counter[int]()
    ask = world.scheduler.connector.get_num_new_matched_tokens

    def count(*args: Any, **named: Any) -> Any:
        asked[world.now] += 1
        return ask(*args, **named)

    world.scheduler.connector.get_num_new_matched_tokens = count
    if hasattr(world.scheduler, "_livepatch_loads"):
        count_anew(world)
    outcome = outcome_of(world.run)
    return {
        "outcome": outcome,
        "steps": world.now,
        "at_once": world.most_running,
        "free": real.free_blocks(world.scheduler),
        "loaded": world.loaded,
        "recomputed": world.recomputed,
        "aborted_loads": world.aborted_loads,
        "ended": world.ended_at,
        "asked": asked.total(),
        "most_asked": max(asked.values(), default=0),
    }


CASES: dict[str, Callable[[], Iterator[Made]]] = {
    case.__name__: case
    for case in (hybrid, hybrid_mixes, alone, shared, adapters, limits, watermark, later_parts, stored)
}


def main() -> None:
    """Play the cases asked for with both scheduler classes."""
    connector = base.connector_alone(sys.argv[1])
    played: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        for case in sys.argv[2:]:
            for mode in real.SCHEDULERS:
                for name, plans, made in CASES[case]():
                    world = World(mode, model_config, connector, plans, **made)
                    played[f"{case} {name} {mode}"] = play(world)
    print_result({"worlds": played}, vllm, lmcache)


if __name__ == "__main__":
    main()
