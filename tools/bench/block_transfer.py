"""What moving blocks costs on CPU memory: mp-block-transfer's operation, memcpy, others, and LMCache's own, in one run.

    python -m vllm_livepatch.tools.bench.block_transfer [--engine-python PYTHON] [--rounds N] [--turn SECONDS]

Runs in an environment with torch and LMCache 0.5.6; one thread. A ratio is our time over the other's in the same round,
the median of the rounds: more than 1 is slower than the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from vllm_livepatch.tools.bench import figures
from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import environments
from vllm_livepatch.tools.proving.playing import DRIVERS

TRANSFER = Path(__file__).resolve().parents[2] / "patches" / "mp_block_transfer" / "transfer.py"
OTHERS = ("memcpy", "rows", "loop", "upstream, tensors", "upstream, addresses")


def times_of(python: Path, rounds: int, turn_seconds: float) -> dict[str, Any]:
    """What the driver prints. Raises UserError."""
    command = [str(python), str(DRIVERS / "block_transfer_bench.py"), str(TRANSFER), str(rounds), str(turn_seconds)]
    environ = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the driver failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measured(rounds: int = 31, turn_seconds: float = 0.005, python: Path | None = None) -> Figures:
    """A row for each shape and direction."""
    found = times_of(python or environments.engine(), rounds, turn_seconds)
    rows = []
    for name, shape in found["shapes"].items():
        for direction in ("to chunks", "to cache"):
            times = shape[direction]
            rows.append(
                [
                    f"{name}, {shape['bytes'] / 1e6:.2f} MB, {direction}",
                    figures.duration(statistics.median(times["ours"])),
                    *(figures.ratio(times["ours"], times[other]) if other in times else "" for other in OTHERS),
                ]
            )
    columns = (f"LMCache {found['lmcache']}, torch {found['torch']}", "ours", *(f"over {other}" for other in OTHERS))
    command = f"python -m vllm_livepatch.tools.bench.block_transfer --rounds {rounds} --turn {turn_seconds}"
    return Figures(command, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.block_transfer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument(
        "--turn", type=float, default=0.005, help="seconds of calls in a row; 0 is one call, after the others' (cold)"
    )
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    options = parser.parse_args()
    measured(options.rounds, options.turn, options.engine_python).show()


if __name__ == "__main__":
    main()
