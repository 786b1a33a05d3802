"""Run worlds on one release's schedulers; print what they came to as one JSON object.

Run by a fresh interpreter with the release's sources, and a bundle or none, on PYTHONPATH. The job is a file of JSON:
`plans` or `seeds`, `modes`, `policy` (of reference.py, or null), `tell`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import time

from result import begin_driver, print_result

STARTED = time.perf_counter()
begin_driver()

import gc
import json
import os
import sys
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import real_scheduler as real
import vllm

from tests.simulation import losses, reference
from tests.simulation import plan as plans
from tests.simulation.world import World

gc.enable()

BATCH = 100
"""Worlds that one forked process runs: what a bundle or a release keeps of them goes with it."""


def play(plan: plans.Plan, mode: str, directory: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run one world; what it came to."""
    policy, tell = job.get("policy"), job.get("tell", False)
    made = reference.POLICIES[policy] if policy else None
    world = World(plan, mode, directory, made, tell, job.get("answers") or "patched").run()
    result: dict[str, Any] = {"seed": plan.seed, "losses": plan.losses, "mode": mode}
    result |= {"faults": [asdict(fault) for fault in world.faults]}
    result |= {"notes": sorted(world.notes), "steps": world.now}
    if tell:
        result["story"] = world.story
    return result


def batch(jobs: list[tuple[plans.Plan, str]], directory: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run worlds in a child of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            played = [play(plan, mode, directory, job) for plan, mode in jobs]
            with os.fdopen(writer, "w") as pipe:
                json.dump(played, pipe)
            sys.stderr.flush()
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"a batch of worlds ended with {status}")
    found: list[dict[str, Any]] = json.loads(output)
    return found


def main() -> None:
    """Read the job, run its worlds."""
    real.quiet()
    imported = time.perf_counter()
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    given = [plans.Plan.from_json(each) for each in job.get("plans", ())]
    given += [plans.draw(seed, job.get("tame", False)) for seed in job.get("seeds", ())]
    given += [losses.lose(seed, job.get("tame", False)) for seed in job.get("losses", ())]
    work = [(plan, mode) for plan in given for mode in job["modes"]]
    with tempfile.TemporaryDirectory() as directory:
        for mode in job["modes"]:  # made once, before the forks
            World(plans.draw(0, tame=True), mode, directory)
        gc.collect()
        gc.freeze()
        worlds: list[dict[str, Any]] = []
        one = job.get("until_one_fails")
        size = BATCH // 2 if one else BATCH
        for first in range(0, len(work), size):
            worlds += batch(work[first : first + size], directory, job)
            if one and any(world["faults"] for world in worlds):
                break
    seconds = {"import": imported - STARTED, "worlds": time.perf_counter() - imported}
    print_result({"worlds": worlds, "seconds": seconds}, vllm)


if __name__ == "__main__":
    main()
