"""What the bundle costs a Python process: bare against armed, in turn, medians.

    python -m vllm_livepatch.tools.bench.startup [--rounds N] [--engine-python PATH]

Also for scale: `import wrapt`. With --engine-python (an environment that has vLLM): the import of a patched target,
stock against patched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import wrapt
from rich.console import Console
from rich.table import Table
from vllm_livepatch.tools.bundles import bundle, catalogue, extensions, placing

TARGET = "vllm.v1.core.sched.scheduler"


def seconds(python: str, code: str, path: str | None, state: Path) -> float:
    """Wall time of one process, its start and end included."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LIVEPATCH", "PYTHON"))}
    environ["LIVEPATCH_STATE_DIR"] = str(state)
    if path is not None:
        environ["PYTHONPATH"] = path
    begin = time.perf_counter()
    subprocess.run([python, "-c", code], env=environ, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def measure(rows: dict[str, tuple[str, str | None]], python: str, rounds: int, state: Path) -> dict[str, list[float]]:
    """Every row once a round, in turn, after a round that does not count; a row is its code and its PYTHONPATH."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(rounds + 1):
        for name, (code, path) in rows.items():
            taken = seconds(python, code, path, state)
            if turn:
                times[name].append(taken)
    return times


def table(title: str, times: dict[str, list[float]]) -> Table:
    """Medians, and the median of the ratios to the first row, taken round by round."""
    shown = Table(title=title, box=None, title_justify="left", header_style="bold")
    for column in ("process", "median", "over the first, round by round"):
        shown.add_column(column, justify="left" if column == "process" else "right")
    first = next(iter(times.values()))
    for name, taken in times.items():
        ratio = statistics.median(mine / other for mine, other in zip(taken, first, strict=True))
        shown.add_row(name, f"{statistics.median(taken) * 1e3:.1f} ms", f"{ratio:.3f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--engine-python", help="an interpreter whose environment has vLLM")
    parser.add_argument("--engine-rounds", type=int, default=7)
    options = parser.parse_args()
    # The interpreter without the tool's own environment, whose .pth files would weigh more than what is measured.
    bare = str(getattr(sys, "_base_executable", sys.executable))
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        files = bundle.contents(catalogue.load(), extensions.at_hand(extensions.chosen()))
        placing.write_directory(files, place / "bundle")
        placing.write_directory(files, place / "readonly")
        placing.write_zip(files, place / "bundle.zip")
        shutil.copytree(Path(wrapt.__file__).parent, place / "wrapt" / "wrapt")
        off = place / "unwritable"  # bytecode cannot be kept beside it: what an unprivileged user pays each time
        (place / "readonly").rename(off)
        for folder, _, _ in os.walk(off):
            Path(folder, "__pycache__").touch()
        rows = {
            "python -c pass": ("pass", None),
            "  armed, directory": ("pass", str(place / "bundle")),
            "  armed, directory that keeps no bytecode": ("pass", str(off)),
            "  armed, zip": ("pass", str(place / "bundle.zip")),
            "  import wrapt": ("import wrapt", str(place / "wrapt")),
        }
        console.print(table(f"start-up, {options.rounds} rounds", measure(rows, bare, options.rounds, place)))
        if options.engine_python:
            code = f"import {TARGET}"
            rows = {f"import {TARGET}": (code, None), "  patched": (code, str(place / "bundle"))}
            times = measure(rows, options.engine_python, options.engine_rounds, place)
            console.print(table(f"a patched target, {options.engine_rounds} rounds", times))


if __name__ == "__main__":
    main()
