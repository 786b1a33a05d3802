# mypy: disable-error-code="import-not-found"
"""Let an error come at each line of `chunked-lmcache-load`, in a world of its own each; print what they came to.

    chunked_load_errors.py CONNECTOR TIMES BUNDLE

The patch is applied here by hand, through the runtime's own guard, as often as there are worlds; so this is run without
the bundle, and takes from it what it needs. TIMES is at how many of a line's runs, at most, the error comes.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import chunked_lmcache_load as base
import lmcache
import real_scheduler as real
import vllm
from chunked_lmcache_load import tokens
from paged_world import BLOCK, CHUNK, Plan, World
from result import print_result, raised
from vllm.v1.core.sched.scheduler import Scheduler

sys.path += map(str, Path(sys.argv[3]).glob("livepatch-*"))
from _vllm_livepatch.patches.chunked_lmcache_load import wrappers
from _vllm_livepatch.sitecustomize import guard
from _vllm_livepatch.sitecustomize.context import PatchContext

CANNOT_FAIL = {"under_way"}
"""A few assignments that belong together: no error can come between them."""


class OwnError(Exception):
    """What goes wrong in the patch."""


def plans() -> list[Plan]:
    """Requests that stock gets through on every release, and in which the patch does all that it can do."""
    return [
        Plan("grows", tokens("grows", 40), outputs=120),
        Plan("short", tokens("short", 57), hit=56 * BLOCK, arrives=1),
        Plan("held", tokens("held", 60), hit=8 * BLOCK, arrives=12),
        Plan("unanswered", tokens("unanswered", 30), hit=28 * BLOCK, arrives=13, answered_after=4, aborted_after=2),
        Plan("gone", tokens("gone", 30), hit=28 * BLOCK, arrives=250, aborted_after=8),
        Plan("fails", tokens("fails", 20), hit=16 * BLOCK, arrives=280, failing_loads=1, loads_before=1),
        Plan("late", tokens("late", 20), hit=16 * BLOCK, arrives=281, answered_after=2),
        Plan("again", tokens("late", 20) + tokens("again", 4), hit=20 * BLOCK, arrives=320),
    ]


class Trace:
    """Counts the patch's lines as they are run; before the one numbered `at` an error comes."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.lines: list[int] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        """Follow what is called in the patch's file."""
        if frame.f_code.co_filename != wrappers.__file__ or frame.f_code.co_name in CANNOT_FAIL:
            return None
        return self.line

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        """Count a line."""
        if event == "line":
            self.lines.append(frame.f_lineno)
            if len(self.lines) - 1 == self.at:
                sys.settrace(None)
                raise OwnError
        return self.line


def play(mode: str, model_config: Any, connector: tuple[str, str], at: int | None) -> tuple[str, list[int], str]:
    """Run one world, with an error before the patch's line number `at`. Return its end, the lines, and what was said."""
    failures: list[str] = []
    context = PatchContext("chunked-lmcache-load", {"max_tokens": CHUNK}, {}, lambda: None, failed=failures.append)
    originals = {}
    for target, wrapper in wrappers.wrappers(context).items():
        name = target.rpartition(".")[2]
        originals[name] = vars(Scheduler)[name]
        setattr(Scheduler, name, guard.in_place_of(originals[name], wrapper, context, target))
    trace = Trace(at)
    try:
        world = World(mode, model_config, connector, plans())
        sys.settrace(trace)
        outcome = world.run()
    except Exception as error:
        sys.settrace(None)
        traceback.print_exc()
        outcome = raised(error)
    finally:
        sys.settrace(None)
        for name, original in originals.items():
            setattr(Scheduler, name, original)
    if context.aside != (at is not None):
        outcome += ", stood aside" if context.aside else ", did not stand aside"
    return outcome, trace.lines, " ".join(failures)


def main() -> None:
    """Play a world for each line."""
    connector = base.connector_alone(sys.argv[1])
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    reached: set[int] = set()
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        for mode in real.SCHEDULERS:
            outcome, lines, _ = play(mode, model_config, connector, None)
            outcomes[f"no error: {outcome}"] += 1
            runs: dict[int, list[int]] = {}
            for index, line in enumerate(lines):
                runs.setdefault(line, []).append(index)
            reached |= set(runs)
            for line, indices in runs.items():
                step = max(1, len(indices) // int(sys.argv[2]))
                for index in indices[::step][: int(sys.argv[2])]:
                    outcome, _, failures = play(mode, model_config, connector, index)
                    outcomes[outcome] += 1
                    if outcome not in ("finishes", "read locks never released"):
                        wrong.append(f"{mode}, line {line}, run {index}: {outcome}; {failures}")
    result = {
        "outcomes": dict(outcomes),
        "wrong": wrong,
        "reached": sorted(reached),
    }
    print_result(result, vllm, lmcache)


if __name__ == "__main__":
    main()
