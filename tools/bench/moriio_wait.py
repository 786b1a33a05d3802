"""What `moriio-timeouts` costs healthy transfers: the wait for 1,000 that end at once, patched over stock, and polling.

    python -m vllm_livepatch.tools.bench.moriio_wait [--release X] [--rounds N] [--transfers N]

The real class of the release waits for transfers of the tests' stand-in for mori.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from vllm_livepatch.tools.bench import drivers, figures
from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.lab import environments
from vllm_livepatch.tools.proving.playing import STANDINS


def measured(release: str = "0.22.1", rounds: int = 40, transfers: int = 1000, python: Path | None = None) -> Figures:
    """A wait's median, stock and patched; and what polling takes of a core."""
    engine = python or environments.engine()
    found = drivers.run("moriio_wait", release, [rounds, transfers], engine, STANDINS)
    rows = [
        [
            f"wait for {transfers:,} transfers: {kind}",
            figures.duration(statistics.median(times["stock"])),
            figures.duration(statistics.median(times["patched"])),
            figures.ratio(times["patched"], times["stock"]),
        ]
        for kind, times in found["times"].items()
    ]
    rows.append([f"polling {transfers:,} that are under way, of one core", "", f"{100 * found['busy']:.1f} %", ""])
    words = f"--release {release} --rounds {rounds} --transfers {transfers}"
    command = f"python -m vllm_livepatch.tools.bench.moriio_wait {words}"
    return Figures(command, (f"vLLM {release}", "stock", "patched", "time over stock's"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.moriio_wait", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--release", default="0.22.1")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--transfers", type=int, default=1000)
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    options = parser.parse_args()
    measured(options.release, options.rounds, options.transfers, options.engine_python).show()


if __name__ == "__main__":
    main()
