"""What all patches that `auto` applies cost the real scheduler under healthy load, in one process.

Steps a second, patched over stock.

    python -m vllm_livepatch.tools.bench.scheduler_steps [--release X] [--rounds N] [--running N]

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
    parser = argparse.ArgumentParser(prog="bench.scheduler_steps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--release", default="0.32.0")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--running", type=int, default=16, help="requests in every step")
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    options = parser.parse_args()
    python = options.engine_python or environments.engine()
    found = drivers.run("steps_per_second", options.release, [options.rounds, options.running], python)
    times = found["times"]
    stock, patched = (statistics.median(times[name]) for name in ("stock", "patched"))
    ratio = statistics.median(one / other for one, other in zip(times["stock"], times["patched"], strict=True))
    console = Console(soft_wrap=True)
    console.print(f"vllm {options.release}, {options.rounds} rounds, {options.running} requests in every step:")
    console.print(f"  wrapped: {', '.join(found['wrapped'])}")
    console.print(f"  stock {1 / stock:,.0f} steps/s, patched {1 / patched:,.0f}; round by round {ratio:.3f}")


if __name__ == "__main__":
    main()
