"""What an engine core does while nothing but a hold remains: steps, and when it sees that the hold has ended.

    python -m vllm_livepatch.tools.bench.idle_steps [--release X]...

The release's own loop, scheduler and queue, stock and patched, by the release tests' driver. Times are the driver's:
a step takes 2 ms, and a sleep 1 ms. What it costs real engines: bench.idle_stepping.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_livepatch.tools.bench import drivers, figures
from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.lab import environments

RELEASES = ("0.33.0",)
MODES = {"Scheduler": "one step under way", "AsyncScheduler": "two steps under way"}


def measured(releases: Sequence[str] = RELEASES, python: Path | None = None) -> Figures:
    engine = python or environments.engine()
    rows = []
    for release in releases:
        found = drivers.run("idle_stepping", release, [], engine)
        both = [found["stock"], found["patched"]]
        for mode, words in MODES.items():
            where = f"vLLM {release}, {words}"
            rows.append([f"{where}: steps in the second second of a hold", *(_steps(run[mode]) for run in both)])
            rows.append(
                [f"{where}: a hold of 0.1 s, seen later by", *(_late(run[mode]["held_shortly"]) for run in both)]
            )
            rows.append([f"{where}: a hold of 2 s, seen later by", *(_late(run[mode]["held"]) for run in both)])
            rows.append(
                [f"{where}: a request that comes meanwhile waits", *(_late(run[mode]["newcomer"]) for run in both)]
            )
        looks = [run["queue"]["apart"] for run in both]
        counted = [str(look["spins"] or len(look["polls"])) for look in looks]
        rows.append([f"vLLM {release}: a worker's looks at its queue in 50 ms", *counted])
    words = " ".join(f"--release {release}" for release in releases)
    command = f"python -m vllm_livepatch.tools.bench.idle_steps {words}"
    return Figures(command, ("while nothing but a hold remains", "stock", "patched"), rows)


def _steps(cases: dict[str, Any]) -> str:
    return str(cases["held"]["steps"])


def _late(case: dict[str, Any]) -> str:
    return "not seen" if case["late"] is None else figures.duration(case["late"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.idle_steps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--release", action="append", help=f"default: {' and '.join(RELEASES)}")
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    options = parser.parse_args()
    measured(options.release or RELEASES, options.engine_python).show()


if __name__ == "__main__":
    main()
