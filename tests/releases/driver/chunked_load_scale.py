# mypy: disable-error-code="import-not-found"
"""Count what the bundle's own code executes where many stored prompts are asked for at once; print it.

    chunked_load_scale.py builtin|lmcache CASE HITS...

CASE is `fits` (a pool of all prompts), `crowd` (of a quarter), `fails` (as `fits`; each load fails once), `time` (as
`fits`; CPU seconds of each step) or `long` (as `fits`; prompts of LONG blocks, stored but for the last chunk). Counted are the instructions of Python that run in files of the patches, by patch,
whatever the machine: of the longest step, and of all. See paged_world.py for what is real and what is stood in for.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import chunked_lmcache_load as base
import lmcache
import paged_world
import real_scheduler as real
import vllm
from chunked_lmcache_load import tokens
from paged_world import BLOCK, CHUNK, Plan, World
from result import outcome_of, print_result

PATCHES = "/_vllm_livepatch/patches/"
BLOCKS = 6
"""A prompt's; the first chunk, of four, is stored."""
LONG = 5120
OUTPUTS = 4
"""Tokens of an answer."""


class Steps:
    """What each call of a scheduler's `schedule` took: instructions of a patch's files, by patch, or CPU seconds."""

    def __init__(self, scheduler: Any, *, timed: bool) -> None:
        self.counted: list[Counter[str]] = []
        self.seconds: list[float] = []
        self.schedule = scheduler.schedule
        scheduler.schedule = self.timed if timed else self.traced

    def timed(self, *args: Any, **kwargs: Any) -> Any:
        """A step with a clock."""
        begin = time.process_time()
        try:
            return self.schedule(*args, **kwargs)
        finally:
            self.seconds.append(time.process_time() - begin)

    def traced(self, *args: Any, **kwargs: Any) -> Any:
        """A step whose instructions are counted."""
        self.counted.append(Counter())
        sys.settrace(self.called)
        try:
            return self.schedule(*args, **kwargs)
        finally:
            sys.settrace(None)

    def called(self, frame: FrameType, event: str, _: Any) -> Any:
        """Follow a patch's function, or its generator that goes on."""
        _, ours, name = frame.f_code.co_filename.partition(PATCHES)
        if not ours:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        counter, patch = self.counted[-1], name.partition("/")[0]

        def instruction(frame: FrameType, event: str, _: Any) -> Any:
            counter[patch] += event == "opcode"
            return instruction

        return instruction


def play(mode: str, model_config: Any, connector: tuple[str, str], case: str, hits: int) -> dict[str, Any]:
    """Run one world; return what it came to and what its steps took."""
    blocks, hit = (LONG, LONG * BLOCK - CHUNK) if case == "long" else (BLOCKS, CHUNK)
    paged_world.POOL_BLOCKS = real.NUM_BLOCKS = 1 + (blocks + 1) * (hits if case != "crowd" else max(1, hits // 4))
    paged_world.STEP_TOKENS = hits * BLOCKS * BLOCK
    options = {"max_num_seqs": hits, "max_num_batched_tokens": max(real.MAX_MODEL_LEN, paged_world.STEP_TOKENS)}
    made: dict[str, Any] = {"hit": hit, "outputs": OUTPUTS, "failing_loads": int(case == "fails")}
    plans = [Plan(f"hit{n}", tokens(f"hit{n}", blocks), **made) for n in range(hits)]
    world = World(mode, model_config, connector, plans, options=options)
    steps = Steps(world.scheduler, timed=case == "time")
    outcome = outcome_of(world.run)
    patches = {patch for counted in steps.counted for patch in counted}
    return {
        "outcome": outcome,
        "steps": world.now,
        "loaded": world.loaded,
        "seconds": sorted(steps.seconds),
        "total": {patch: sum(counted[patch] for counted in steps.counted) for patch in patches},
        "longest": {patch: max(counted[patch] for counted in steps.counted) for patch in patches},
    }


def main() -> None:
    """Play the case with both scheduler classes, for each number of hits."""
    connector = base.connector_alone(sys.argv[1])
    if sys.argv[2] == "long":
        real.MAX_MODEL_LEN = (LONG + 1) * BLOCK
    played: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        for mode in real.SCHEDULERS:
            played[mode] = {hits: play(mode, model_config, connector, sys.argv[2], int(hits)) for hits in sys.argv[3:]}
    print_result({"worlds": played}, vllm, lmcache)


if __name__ == "__main__":
    main()
