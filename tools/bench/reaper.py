"""What kv-block-reaper costs the real scheduler with many live requests: its steps with over without, in one process.

    python -m vllm_livepatch.tools.bench.reaper [--release X] [--rounds N] [--live N]

The scheduler is set up by the release tests' driver.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from rich.console import Console
from vllm_livepatch.tools.bench import drivers
from vllm_livepatch.tools.lab import environments


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.reaper", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--release", default="0.29.0")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--live", type=int, default=10_000, help="requests that the scheduler knows")
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    options = parser.parse_args()
    python = options.engine_python or environments.engine()
    variables = {"LIVEPATCH_KV_BLOCK_REAPER": "on", "LIVEPATCH_STALE_FINISHED_RECVING": "off"}
    arguments = [options.rounds, options.live]
    found = drivers.run("reaper_steps", options.release, arguments, python, variables=variables)
    times = found["times"]
    stock, patched = (statistics.median(times[name]) * 1e6 for name in ("stock", "patched"))
    ratio = statistics.median(one / other for one, other in zip(times["patched"], times["stock"], strict=True))
    console = Console(soft_wrap=True)
    live = f"{found['live']:,} live requests, {found['running']} running, {found['held']:,} holds not due"
    console.print(f"vllm {options.release}, {options.rounds} rounds, {live}:")
    console.print(f"  a step without {stock:,.0f} us, with {patched:,.0f} us; round by round {ratio:.3f}")


if __name__ == "__main__":
    main()
