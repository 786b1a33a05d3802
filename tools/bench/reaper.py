"""What kv-block-reaper costs the real scheduler with many live requests: its steps with over without, in one process.

    python -m vllm_livepatch.tools.bench.reaper [--release X] [--rounds N] [--live N]

Runs from a checkout: the scheduler is set up by the release tests' driver.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from vllm_livepatch.tools import bundle, catalogue, environments, sources
from vllm_livepatch.tools.errors import UserError

DRIVER = Path(__file__).resolve().parents[2] / "tests" / "releases" / "driver"


def measure(release: str, rounds: int, live: int, python: Path) -> dict[str, Any]:
    """CPU seconds per step of each round, for `stock` and `patched`, and what was live. Raises UserError."""
    if not DRIVER.is_dir():
        raise UserError("this benchmark needs a checkout of the project, for its release tests")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary, "bundle")
        bundle.write_directory(bundle.contents(catalogue.load()), place)
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (place, sources.site_packages("vllm", release), DRIVER))),
            "LIVEPATCH_STATE_DIR": temporary,
            "LIVEPATCH_KV_BLOCK_REAPER": "on",
            "LIVEPATCH_STALE_FINISHED_RECVING": "off",
            "VLLM_TARGET_DEVICE": "cpu",
        }
        done = subprocess.run(
            [str(python), str(DRIVER / "reaper_steps.py"), str(rounds), str(live)],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise UserError(f"the driver failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.reaper", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--release", default="0.29.0")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--live", type=int, default=10_000, help="requests that the scheduler knows")
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    options = parser.parse_args()
    found = measure(options.release, options.rounds, options.live, options.engine_python or environments.engine())
    times = found["times"]
    stock, patched = (statistics.median(times[name]) * 1e6 for name in ("stock", "patched"))
    ratio = statistics.median(one / other for one, other in zip(times["patched"], times["stock"], strict=True))
    console = Console(soft_wrap=True)
    live = f"{found['live']:,} live requests, {found['running']} running, {found['held']:,} holds not due"
    console.print(f"vllm {options.release}, {options.rounds} rounds, {live}:")
    console.print(f"  a step without {stock:,.0f} us, with {patched:,.0f} us; round by round {ratio:.3f}")


if __name__ == "__main__":
    main()
