"""What the bundle costs a Python process: bare against armed, in turn, medians.

    python -m vllm_livepatch.tools.bench.startup [--rounds N] [--engine-rounds N] [--engine-python PATH]

Also for scale: `import wrapt`. With --engine-rounds: the processor time to import patched targets, of vLLM and of
LMCache, in the engine's environment: the first time in a pod, where nothing of the bundle was ever imported, and again.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import wrapt
from vllm_livepatch.tools.bench import figures
from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.bundles import bundle, catalogue, placing

TARGETS, RELEASE = "vllm.v1.core.sched.scheduler, lmcache.integration.vllm.vllm_multi_process_adapter", "0.32.0"
IMPORT = f"import of the scheduler and of LMCache's adapter, vLLM {RELEASE}, processor time"
COLUMNS = ("", "stock", "with the bundle", "difference (95 % interval)", "time over stock's")


def seconds(python: str, code: str, path: str | None, state: Path, environ: Mapping[str, str] = os.environ) -> float:
    """Wall time of one process, its start and end included."""
    environ = {name: value for name, value in environ.items() if not name.startswith(("LIVEPATCH", "PYTHON"))}
    environ["LIVEPATCH_STATE_DIR"] = str(state)
    if path is not None:
        environ["PYTHONPATH"] = path
    begin = time.perf_counter()
    subprocess.run([python, "-c", code], env=environ, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def measure(rows: dict[str, tuple[str, str | None]], python: str, rounds: int, state: Path) -> dict[str, list[float]]:
    """Every row once a round, after a round that does not count; a row is its code and its PYTHONPATH.

    Each round begins with another row: whoever comes after the longest process would always pay for what that left.
    """
    times: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(rounds + 1):
        first = turn % len(rows)
        for name in [*rows][first:] + [*rows][:first]:
            code, path = rows[name]
            taken = seconds(python, code, path, state)
            if turn:
                times[name].append(taken)
    return times


def imports(python: str, files: dict[str, bytes], rounds: int, place: Path) -> dict[str, list[float]]:
    """Processor seconds of an import, in turn: stock, the first with a new bundle and an empty cache, and the next."""
    times: dict[str, list[float]] = {"stock": [], f"{IMPORT}, the first in a pod": [], f"{IMPORT}, again": []}
    for turn in range(rounds + 1):
        home = place / f"home-{turn}"
        placing.write_directory(files, home / "bundle")
        for row, path in zip(times.values(), (None, home / "bundle", home / "bundle"), strict=True):
            environ = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds(python, f"import {TARGETS}", None if path is None else str(path), home / "state", environ)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if turn:
                row.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return times


def compared(times: dict[str, list[float]]) -> list[list[str]]:
    """A row for each process but the first, which is what they are compared with."""
    first, *others = times
    return [
        [
            name,
            figures.duration(statistics.median(times[first])),
            figures.duration(statistics.median(times[name])),
            figures.difference(times[name], times[first]),
            figures.ratio(times[name], times[first]),
        ]
        for name in others
    ]


def measured(rounds: int = 100, engine_rounds: int = 7, engine_python: Path | None = None) -> Figures:
    """The rows of docs/benchmarks.md."""
    # The interpreter without the tool's own environment, whose .pth files would weigh more than what is measured.
    bare = str(getattr(sys, "_base_executable", sys.executable))
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        files = bundle.contents(catalogue.load())
        placing.write_directory(files, place / "bundle")
        placing.write_directory(files, place / "readonly")
        placing.write_zip(files, place / "bundle.zip")
        shutil.copytree(Path(wrapt.__file__).parent, place / "wrapt" / "wrapt")
        off = place / "unwritable"  # bytecode cannot be kept beside it: what an unprivileged user pays each time
        (place / "readonly").rename(off)
        for folder, _, _ in os.walk(off):
            Path(folder, "__pycache__").touch()
        rows = {
            "stock": ("pass", None),
            "`python -c pass`, directory": ("pass", str(place / "bundle")),
            "`python -c pass`, directory that keeps no bytecode": ("pass", str(off)),
            "`python -c pass`, zip": ("pass", str(place / "bundle.zip")),
            '`python -c "import wrapt"`, for scale': ("import wrapt", str(place / "wrapt")),
        }
        found = compared(measure(rows, bare, rounds, place))
        if engine_rounds:
            from vllm_livepatch.tools.lab import environments  # needs the extra `lab`

            python = str(engine_python or environments.engine(RELEASE))
            found += compared(imports(python, files, engine_rounds, place))
    command = f"python -m vllm_livepatch.tools.bench.startup --rounds {rounds} --engine-rounds {engine_rounds}"
    return Figures(command, COLUMNS, found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    parser.add_argument("--engine-rounds", type=int, default=0)
    options = parser.parse_args()
    measured(options.rounds, options.engine_rounds, options.engine_python).show()


if __name__ == "__main__":
    main()
