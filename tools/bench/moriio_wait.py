"""What `moriio-timeouts` costs healthy transfers: the wait for 1,000 that end at once, patched over stock, and polling.

    python -m vllm_livepatch.tools.bench.moriio_wait [--release X] [--rounds N] [--transfers N]

Runs from a checkout: the real class of the release waits for transfers of the tests' stand-in for mori.
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

TESTS = Path(__file__).resolve().parents[2] / "tests"


def measure(release: str, rounds: int, transfers: int, python: Path) -> dict[str, Any]:
    """Seconds of each wait (`times`, by kind, then `stock` and `patched`), and `busy`, polling's share of a core.

    Raises UserError.
    """
    if not TESTS.is_dir():
        raise UserError("this benchmark needs a checkout of the project, for its release tests")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary, "bundle")
        bundle.write_directory(bundle.contents(catalogue.load()), place)
        path = os.pathsep.join(map(str, (place, sources.site_packages("vllm", release), TESTS / "standins")))
        environ = {**os.environ, "PYTHONPATH": path, "LIVEPATCH_STATE_DIR": temporary, "VLLM_TARGET_DEVICE": "cpu"}
        script = TESTS / "releases" / "driver" / "moriio_wait.py"
        done = subprocess.run(
            [str(python), str(script), str(rounds), str(transfers)],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise UserError(f"the driver failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.moriio_wait", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--release", default="0.22.1")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--transfers", type=int, default=1000)
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    options = parser.parse_args()
    python = options.engine_python or environments.engine()
    result = measure(options.release, options.rounds, options.transfers, python)
    console = Console(width=160)
    console.print(f"vllm {options.release}, {options.rounds} rounds, {options.transfers} transfers")
    for kind, times in result["times"].items():
        stock, patched = (1000 * statistics.median(times[way]) for way in ("stock", "patched"))
        ratio = statistics.median(one / other for one, other in zip(times["patched"], times["stock"], strict=True))
        console.print(f"{kind}: stock {stock:.2f} ms, patched {patched:.2f} ms; patched over stock: {ratio:.3f}")
    console.print(f"polling while all are under way: {100 * result['busy']:.1f} % of a core")


if __name__ == "__main__":
    main()
