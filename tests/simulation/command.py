"""The command line: any number of worlds on any releases, or one seed, shrunk and told step by step."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from vllm_livepatch.tools.lab import environments
from vllm_livepatch.tools.measured import measured_on
from vllm_livepatch.tools.releases import registry

from tests.simulation import answers, losses, setups, shrink

REFERENCES = "reference, or the name of a wrong one in reference.py"


def parser() -> argparse.ArgumentParser:
    """What can be asked for."""
    parsed = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parsed.add_argument("--release", action="append", help="a pinned vLLM release; may be given again (default: all)")
    parsed.add_argument("--mode", action="append", choices=setups.MODES, help="the scheduler class (default: both)")
    parsed.add_argument("--seed", type=int, help="one world: shrink it where it fails, and tell its story")
    parsed.add_argument("--plan", type=Path, help="the same of a plan in a file of JSON")
    parsed.add_argument("--seeds", type=int, default=200, help="how many worlds a release and mode (default: 200)")
    parsed.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parsed.add_argument("--bundle", type=Path, help="a bundle's directory (default: the stock release)")
    parsed.add_argument("--policy", help=REFERENCES)
    parsed.add_argument(
        "--losses", action="store_true", help="seeds are those of losses.py: loads, peers, servers are lost"
    )
    parsed.add_argument(
        "--answers", choices=answers.ANSWERS, help="how workers answer for what is lost (default: the setup's)"
    )
    parsed.add_argument("--tame", action="store_true", help="nobody aborts or lies, nothing is lost or fails")
    parsed.add_argument("--whole", action="store_true", help="with --seed or --plan: do not shrink")
    parsed.add_argument("--processes", type=int, default=2, help="warm interpreters (default: 2)")
    parsed.add_argument("--json", action="store_true", help="print the figures as JSON")
    parsed.add_argument("--setup", default="", help="what the figures' setup is called (default: stock, or the bundle)")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 where an invariant was broken."""
    asked = parser().parse_args(arguments)
    releases = asked.release or [pin.version for pin in registry.pins("vllm")]
    if asked.bundle is not None and not asked.bundle.is_dir():
        print(f"there is no bundle in {asked.bundle}", file=sys.stderr)
        return 2
    given = [
        setups.Setup(
            release,
            asked.bundle and asked.bundle.resolve(),
            asked.policy,
            asked.mode or setups.MODES,
            asked.tame,
            answers=asked.answers or "",
        )
        for release in releases
    ]
    # What drivers say is printed as they end, for pytest; here stdout is the result's.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        if asked.seed is None and asked.plan is None:
            status, output = many(given, asked)
        else:
            with setups.interpreters(1, environments.engine()) as (warm,):
                status, output = tell(warm, given[0], asked)
    print(output)
    return status


def tell(warm: Any, setup: setups.Setup, asked: argparse.Namespace) -> tuple[int, str]:
    """One world's story, and its plan, shrunk where it fails."""
    setup.modes = setup.modes[:1]
    plan = (
        shrink.Plan.from_json(json.loads(asked.plan.read_text(encoding="utf-8")))
        if asked.plan
        else (losses.lose if asked.losses else shrink.draw)(asked.seed, asked.tame)
    )
    broken = shrink.kinds(setups.run(warm, setup, plans=[plan.to_json()])[0])
    if broken and not asked.whole:
        print(f"broken: {', '.join(sorted(broken))}; shrinking", file=sys.stderr)

        def fails(plans: Sequence[Any]) -> list[bool]:
            found = setups.run(warm, setup, plans=[each.to_json() for each in plans])
            return [bool(broken & shrink.kinds(world)) for world in found]

        plan = shrink.shrink(plan, fails)
    setup.tell = True
    (world,) = setups.run(warm, setup, plans=[plan.to_json()])
    status = 1 if world["faults"] else 0
    if asked.json:
        return status, json.dumps({"plan": plan.to_json(), **world})
    title = f"vLLM {setup.release}, {setup.modes[0]}, connector {plan.connector}, {plan.groups}, {plan.blocks} blocks"
    return status, "\n".join([title, *world["story"], json.dumps(plan.to_json())])


def many(given: Sequence[setups.Setup], asked: argparse.Namespace) -> tuple[int, str]:
    """Figures of many worlds: for each release, in how many each invariant was broken."""
    began, found = time.monotonic(), {setup.release: figures() for setup in given}
    ranges = range(asked.first, asked.first + asked.seeds, setups.AT_ONCE)
    jobs = [
        (setup, range(first, min(first + setups.AT_ONCE, asked.first + asked.seeds)))
        for first in ranges
        for setup in given
    ]
    with setups.interpreters(asked.processes, environments.engine()) as warm:
        free: Queue[Any] = Queue()
        for each in warm:
            free.put(each)

        def one(job: tuple[setups.Setup, range]) -> tuple[str, list[Any]]:
            interpreter = free.get()
            try:
                drawn: dict[str, Any] = {"losses" if asked.losses else "seeds": job[1]}
                return job[0].release, setups.run(interpreter, job[0], **drawn)
            finally:
                free.put(interpreter)

        with ThreadPoolExecutor(asked.processes) as pool:
            for done, (release, worlds) in enumerate(pool.map(one, jobs), 1):
                add(found[release], worlds)
                seconds = time.monotonic() - began
                print(f"\r{done} of {len(jobs)} jobs, {seconds:.0f} s, now {release} ", end="", file=sys.stderr)
    print(file=sys.stderr)
    name = asked.setup or (asked.policy or (asked.bundle.name if asked.bundle else "stock"))
    result = {
        "setup": name,
        **measured_on(Path(__file__).parents[2]),
        "seeds": [asked.first, asked.seeds],
        "tame": asked.tame,
        "losses": asked.losses,
        "releases": found,
    }
    status = 1 if any(each["failed"] for each in found.values()) else 0
    if asked.json:
        return status, json.dumps(result)
    lines = []
    for release, each in found.items():
        broken = ", ".join(f"{kind} {count}" for kind, count in each["broken"].items()) or "nothing"
        lines.append(f"{release:8} {each['failed']:6} of {each['worlds']} worlds: {broken}; first: {each['first']}")
    return status, "\n".join(lines)


def figures() -> dict[str, Any]:
    """An empty row."""
    return {"worlds": 0, "failed": 0, "steps": 0, "broken": Counter(), "notes": Counter(), "first": {}}


def add(row: dict[str, Any], worlds: Sequence[Any]) -> None:
    """Add worlds to a release's row; `first` is a seed of each invariant, to replay."""
    for world in worlds:
        row["worlds"] += 1
        row["steps"] += world["steps"]
        row["failed"] += bool(world["faults"])
        row["notes"].update(world["notes"])
        for kind in sorted(shrink.kinds(world)):
            row["broken"][kind] += 1
            drawn = "--losses " if world["losses"] else ""
            row["first"].setdefault(kind, f"{drawn}--seed {world['seed']} --mode {world['mode']}")
