"""What moving blocks costs on CPU memory: mp-block-transfer's operation, memcpy, others, and LMCache's own, in one run.

    python -m vllm_livepatch.tools.bench.block_transfer [--engine-python PYTHON] [--rounds N] [--turn SECONDS]

Runs in an environment with torch and LMCache 0.5.6; one thread. A ratio is how many times as fast ours
is as the other: its time over ours in the same round, the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm_livepatch.tools.bench.drivers import DRIVERS
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import environments

TRANSFER = Path(__file__).resolve().parents[2] / "patches" / "mp_block_transfer" / "transfer.py"
OTHERS = ("memcpy", "rows", "loop", "upstream, tensors", "upstream, addresses")


def measure(python: Path, rounds: int, turn_seconds: float) -> dict[str, Any]:
    """What the driver prints. Raises UserError."""
    command = [str(python), str(DRIVERS / "block_transfer_bench.py"), str(TRANSFER), str(rounds), str(turn_seconds)]
    environ = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the driver failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def ratio(other: list[float], ours: list[float]) -> float:
    """The median over the rounds."""
    return statistics.median(theirs / own for theirs, own in zip(other, ours, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.block_transfer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--turn", type=float, default=0.005, help="seconds of calls in a row; 0 is one call, after the others' (cold)"
    )
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    options = parser.parse_args()
    found = measure(options.engine_python or environments.engine(), options.rounds, options.turn)
    table = Table("shape", "MB", "direction", "ours, us", *(f"over {other}" for other in OTHERS))
    for name, shape in found["shapes"].items():
        for direction in ("to chunks", "to cache"):
            times = shape[direction]
            ratios = [f"{ratio(times[other], times['ours']):.2f}" if other in times else "" for other in OTHERS]
            ours = statistics.median(times["ours"]) * 1e6
            table.add_row(name, f"{shape['bytes'] / 1e6:.2f}", direction, f"{ours:,.0f}", *ratios)
    console = Console(width=None if os.isatty(1) else 200)
    console.print(f"lmcache {found['lmcache']}, torch {found['torch']}, {options.rounds} rounds, medians:")
    console.print(table)


if __name__ == "__main__":
    main()
