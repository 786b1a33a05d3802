"""What the patch costs the real scheduler under healthy load: steps a second, patched over stock, in one process.

    python -m vllm_livepatch.tools.bench.scheduler_steps [--release X] [--rounds N] [--running N]

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

from rich.console import Console
from vllm_livepatch.tools import bundle, catalogue, environments, sources
from vllm_livepatch.tools.errors import UserError

DRIVER = Path(__file__).resolve().parents[2] / "tests" / "releases" / "driver"


def measure(release: str, rounds: int, running: int, python: Path) -> dict[str, list[float]]:
    """CPU seconds per step of each round, for `stock` and `patched`. Raises UserError."""
    if not DRIVER.is_dir():
        raise UserError("this benchmark needs a checkout of the project, for its release tests")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary, "bundle")
        bundle.write_directory(bundle.contents(catalogue.load()), place)
        path = os.pathsep.join(map(str, (place, sources.site_packages("vllm", release), DRIVER)))
        environ = {**os.environ, "PYTHONPATH": path, "LIVEPATCH_STATE_DIR": temporary, "VLLM_TARGET_DEVICE": "cpu"}
        script = DRIVER / "steps_per_second.py"
        done = subprocess.run(
            [str(python), str(script), str(rounds), str(running)],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise UserError(f"the driver failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    times: dict[str, list[float]] = json.loads(done.stdout)["times"]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.scheduler_steps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--release", default="0.32.0")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--running", type=int, default=16, help="requests in every step")
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    options = parser.parse_args()
    times = measure(options.release, options.rounds, options.running, options.engine_python or environments.engine())
    stock, patched = (statistics.median(times[name]) for name in ("stock", "patched"))
    ratio = statistics.median(one / other for one, other in zip(times["stock"], times["patched"], strict=True))
    console = Console(soft_wrap=True)
    console.print(f"vllm {options.release}, {options.rounds} rounds, {options.running} requests in every step:")
    console.print(f"  stock {1 / stock:,.0f} steps/s, patched {1 / patched:,.0f}; round by round {ratio:.3f}")


if __name__ == "__main__":
    main()
