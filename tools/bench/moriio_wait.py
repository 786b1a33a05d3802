"""What `moriio-timeouts` costs healthy transfers: the wait for 1,000 that end at once, patched over stock, and polling.

    python -m vllm_livepatch.tools.bench.moriio_wait [--release X] [--rounds N] [--transfers N]

The real class of the release waits for transfers of the tests' stand-in for mori.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from rich.console import Console
from vllm_livepatch.tools.bench import drivers
from vllm_livepatch.tools.lab import environments


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.moriio_wait", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--release", default="0.22.1")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--transfers", type=int, default=1000)
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    options = parser.parse_args()
    python = options.engine_python or environments.engine()
    result = drivers.run("moriio_wait", options.release, [options.rounds, options.transfers], python, drivers.STANDINS)
    console = Console(width=160)
    console.print(f"vllm {options.release}, {options.rounds} rounds, {options.transfers} transfers")
    for kind, times in result["times"].items():
        stock, patched = (1000 * statistics.median(times[way]) for way in ("stock", "patched"))
        ratio = statistics.median(one / other for one, other in zip(times["patched"], times["stock"], strict=True))
        console.print(f"{kind}: stock {stock:.2f} ms, patched {patched:.2f} ms; patched over stock: {ratio:.3f}")
    console.print(f"polling while all are under way: {100 * result['busy']:.1f} % of a core")


if __name__ == "__main__":
    main()
