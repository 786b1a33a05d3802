"""What kv-block-reaper costs the real scheduler with many live requests: its steps with over without, in one process.

    python -m vllm_livepatch.tools.bench.reaper [--release X] [--rounds N] [--live N]

The scheduler is set up by the release tests' driver.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from vllm_livepatch.tools.bench import drivers, figures
from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.lab import environments


def measured(release: str = "0.29.0", rounds: int = 40, live: int = 10_000, python: Path | None = None) -> Figures:
    """A step's median, without the patch and with it."""
    variables = {"LIVEPATCH_KV_BLOCK_REAPER": "on", "LIVEPATCH_STALE_FINISHED_RECVING": "off"}
    engine = python or environments.engine()
    found = drivers.run("reaper_steps", release, [rounds, live], engine, variables=variables)
    without, within = found["times"]["stock"], found["times"]["patched"]
    state = f"{found['live']:,} live requests, {found['running']} running, {found['held']:,} holds not due"
    row = [
        f"vLLM {release}: {state}",
        figures.duration(statistics.median(without)),
        figures.duration(statistics.median(within)),
        figures.difference(within, without),
        figures.ratio(within, without),
    ]
    command = f"python -m vllm_livepatch.tools.bench.reaper --release {release} --rounds {rounds} --live {live}"
    columns = ("a scheduler step", "without the patch", "with it", "difference (95 % interval)", "with it over without")
    return Figures(command, columns, [row])


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.reaper", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--release", default="0.29.0")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--live", type=int, default=10_000, help="requests that the scheduler knows")
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    options = parser.parse_args()
    measured(options.release, options.rounds, options.live, options.engine_python).show()


if __name__ == "__main__":
    main()
