"""What all patches that `auto` applies cost the real scheduler under healthy load, in one process.

    python -m vllm_livepatch.tools.bench.scheduler_steps [--release X]... [--rounds N] [--running N]...

The scheduler is set up by the release tests' driver: a model that does not run, and requests that live for 40 steps,
each with a load and a send. Processor seconds a step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from vllm_livepatch.tools.bench import drivers, figures
from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.lab import environments

COLUMNS = ("", "stock", "with the bundle", "difference (95 % interval)", "time over stock's")


def measured(
    releases: Sequence[str] = ("0.32.0", "0.29.0"),
    rounds: int = 60,
    running: Sequence[int] = (8, 16),
    python: Path | None = None,
) -> Figures:
    """A row for each release and number of requests in every step."""
    engine = python or environments.engine()
    rows = []
    for release in releases:
        for number in running:
            times = drivers.run("steps_per_second", release, [rounds, number], engine)["times"]
            rows.append(
                [
                    f"a scheduler step, vLLM {release}, {number} requests in each",
                    figures.duration(statistics.median(times["stock"])),
                    figures.duration(statistics.median(times["patched"])),
                    figures.difference(times["patched"], times["stock"]),
                    figures.ratio(times["patched"], times["stock"]),
                ]
            )
    words = ["python -m vllm_livepatch.tools.bench.scheduler_steps", f"--rounds {rounds}"]
    words += [f"--release {release}" for release in releases] + [f"--running {number}" for number in running]
    return Figures(" ".join(words), COLUMNS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.scheduler_steps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--release", action="append", help="repeatable; default: 0.32.0")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--running", type=int, action="append", help="requests in every step; repeatable; default: 16")
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    options = parser.parse_args()
    measured(options.release or ["0.32.0"], options.rounds, options.running or [16], options.engine_python).show()


if __name__ == "__main__":
    main()
