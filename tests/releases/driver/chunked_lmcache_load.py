# mypy: disable-error-code="import-not-found"
"""Drive one release's scheduler and LMCache connector through large loads; print what happened as one JSON object.

    chunked_lmcache_load.py MIXES builtin|lmcache...

MIXES is how many random mixes of each kind to play; the others are connector classes: the one that vLLM brings, or the
one that LMCache brings. See paged_world.py for what is real and what is stood in for. What to expect of which release is
none of this script's business.
"""

from __future__ import annotations

import time

from result import begin_driver, outcome_of, print_result

STARTED = time.perf_counter()
begin_driver()

import gc
import importlib
import logging
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import native_double

native_double.stand_in()

import lmcache
import paged_world
import real_scheduler as real
import vllm
from paged_world import BLOCK, CHUNK, Plan, World

gc.enable()

BUILT_IN = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector"
SHIPPED = "lmcache.integration.vllm.lmcache_mp_connector"
MODULES = {"builtin": BUILT_IN, "lmcache": SHIPPED}

real.MAX_MODEL_LEN = 2048
real.NUM_BLOCKS = paged_world.POOL_BLOCKS


def tokens(name: str, blocks: int) -> list[int]:
    """A prompt like no other name's."""
    return random.Random(name).choices(range(3, 250), k=blocks * BLOCK)


def equal_prompts() -> list[Plan]:
    """Clients that ask the same long thing, most of which LMCache holds."""
    prompt = tokens("equal", 30)
    return [Plan(f"equal{number}", prompt, hit=24 * BLOCK) for number in range(8)]


def small_first_turn() -> list[Plan]:
    """A conversation of which LMCache holds the first turn, then such that it holds nearly whole."""
    first = Plan("first", tokens("first", 60), hit=8 * BLOCK)
    return [first, *(Plan(f"large{n}", tokens(f"large{n}", 60), hit=48 * BLOCK) for n in range(4))]


def head_of_line() -> list[Plan]:
    """The oldest request's lookup answers late; younger ones load meanwhile, and hold most of the pool."""
    oldest = Plan("oldest", tokens("oldest", 40), hit=36 * BLOCK, answered_after=4)
    return [oldest, *(Plan(f"young{n}", tokens(f"young{n}", 45), hit=40 * BLOCK) for n in range(4))]


def late(shape: Callable[[], list[Plan]]) -> Callable[[], list[Plan]]:
    """The same, every lookup answered two steps later."""

    def later() -> list[Plan]:
        plans = shape()
        for plan in plans:
            plan.answered_after += 2
        return plans

    later.__name__ = f"{shape.__name__}_late"
    return later


SHAPES = [shape for each in (equal_prompts, small_first_turn, head_of_line) for shape in (each, late(each))]


def mix(seed: int, *, faults: bool) -> list[Plan]:
    """A random mix: conversations that share turns, sizes up to the pool's, lookups late; aborts and failures if asked."""
    dice = random.Random(seed)
    stems = [tokens(f"stem{seed}.{number}", 20) for number in range(2)]
    plans = []
    for number in range(dice.randint(6, 16)):
        blocks = dice.choice([4, 12, 30, 45, 60, 85])
        prompt = tokens(f"mix{seed}.{number}", blocks)
        if dice.random() < 0.3:
            shared = dice.randint(1, 20) * BLOCK
            prompt = (dice.choice(stems)[:shared] + prompt)[: blocks * BLOCK]
        prompt = prompt[: len(prompt) - dice.choice([0, 0, 1, 5])]
        held = dice.choice([0, len(prompt), len(prompt), dice.randint(0, len(prompt))])
        plan = Plan(
            f"mix{seed}.{number}",
            prompt,
            hit=held // CHUNK * CHUNK,
            arrives=dice.choice([0, 0, dice.randint(0, 30)]),
            answered_after=dice.choice([0, 0, 1, dice.randint(0, 12)]),
            outputs=dice.choice([1, 2, 10, 40]),
        )
        if faults and dice.random() < 0.3:
            plan.aborted_after = dice.randint(1, 25)
        if faults and dice.random() < 0.2:
            plan.failing_loads = 1
        plans.append(plan)
    return plans


def play(mode: str, model_config: Any, connector: tuple[str, str], plans: list[Plan], seed: int) -> dict[str, Any]:
    """Run one world; return what it came to and its figures."""
    world = World(mode, model_config, connector, plans, seed)
    outcome = outcome_of(world.run)
    return {
        "outcome": outcome,
        "hit": sum(plan.hit for plan in plans),
        "loaded": world.loaded,
        "recomputed": world.recomputed,
        "largest_load": world.largest_load,
        "most_committed": world.most_committed,
        "steps": world.now,
    }


def hide_later_adapter() -> None:
    """Releases to 0.16 name blocks by hash, as LMCache did before it had an adapter: they fall back on their own.

    That can be imported with no LMCache from 0.3.15 on: next to it is the other connector's, which wants names that are
    gone (`lmcache.config.LMCacheEngineMetadata`). Nothing of it runs here.
    """
    integration = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_integration"
    other = f"{integration}.vllm_v1_adapter"
    sys.modules[other] = native_double.NativeDouble(other)
    try:
        own = importlib.import_module(f"{integration}.multi_process_adapter")
    except ImportError as error:  # LMCache from 0.5.1 lacks what it needs, and brings the connector's adapter itself
        print(f"the built-in adapter is not importable: {error}", file=sys.stderr)
        return
    finally:
        del sys.modules[other]
    if "token_ids" not in own.LoadStoreOp.__dataclass_fields__:
        hidden: Any = None
        sys.modules["lmcache.integration.vllm.vllm_multi_process_adapter"] = hidden


def class_name(module: str) -> str:
    """The connector's name: vLLM calls its own `...Upstream` since LMCache's is preferred to it."""
    found = importlib.import_module(module)
    upstream = "LMCacheMPConnectorUpstream"
    return upstream if module == BUILT_IN and hasattr(found, upstream) else "LMCacheMPConnector"


def quiet() -> None:
    """Leave only errors in vLLM's log, and less in LMCache's."""
    real.quiet()
    logging.getLogger("lmcache").setLevel(logging.CRITICAL)


def connector_alone(which: str) -> tuple[str, str]:
    """Module and class of the one connector that a process plays with; the log is quiet."""
    quiet()
    if which == "builtin":
        hide_later_adapter()
    return MODULES[which], class_name(MODULES[which])


def play_all(mode: str, model_config: Any, module: str, mixes: int) -> dict[str, Any]:
    """Play everything with one scheduler class and one connector class."""
    connector = (module, class_name(module))
    played = {shape.__name__: play(mode, model_config, connector, shape(), 0) for shape in SHAPES}
    for seed in range(mixes):
        for faults in (False, True):
            name = f"{'faults' if faults else 'mix'}{seed}"
            played[name] = play(mode, model_config, connector, mix(seed, faults=faults), seed)
    return played


def found(mixes: int, connectors: Iterable[str]) -> dict[str, Any]:
    """What everything came to, by connector class and scheduler class."""
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        return {
            f"{which} {mode}": play_all(mode, model_config, MODULES[which], mixes)
            for which in connectors
            for mode in real.SCHEDULERS
        }


def main() -> None:
    """Play everything with all connector classes asked for. PART_TOKENS: the patch's own, for a pool of this size."""
    quiet()
    patch = sys.modules.get("_vllm_livepatch.patches.chunked_lmcache_load.wrappers")
    if patch is not None and "PART_TOKENS" in os.environ:
        vars(patch)["PART_TOKENS"] = int(os.environ["PART_TOKENS"])
    hide_later_adapter()
    imported = time.perf_counter()
    worlds = found(int(sys.argv[1]), sys.argv[2:])
    result = {
        "worlds": worlds,
        "seconds": {"import": imported - STARTED, "worlds": time.perf_counter() - imported},
    }
    print_result(result, vllm, lmcache)


if __name__ == "__main__":
    main()
