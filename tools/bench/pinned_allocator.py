"""Time to a usable host pool and its resident memory, LMCache's lazy allocator stock against patched.

    python -m vllm_livepatch.tools.bench.pinned_allocator [--python PYTHON] [--release 0.5.6] [--gb 1 4 16]

PYTHON has torch and what LMCache imports. The device's pin call is stood in for by touching each page, which is what
pinning does to resident memory; 64 MiB are pinned at the start, steps are 1 GiB, and 512 MiB are allocated. A final
size that free memory has no room for is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_livepatch.tools.bench import figures
from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.lab import environments
from vllm_livepatch.tools.proving.playing import DRIVERS
from vllm_livepatch.tools.releases import registry, sources

GIB = 1 << 30
CODE = """
import sys
sys.path.insert(0, sys.argv[2])
import pinned_allocator_double as double
from result import print_result
print_result(double.measure(int(sys.argv[1])))
"""


def free_gib() -> float:
    """Memory that could be allocated now."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("MemAvailable"))
    return int(line.split()[1]) / (1 << 20)


def measure(python: str, release: str, bundle: Path | None, gib: int) -> dict[str, Any]:
    """One process: seconds until the manager stands and until its pool has settled, and resident MiB then."""
    path = [*([str(bundle)] if bundle else []), str(sources.site_packages("lmcache", release))]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "LMCACHE_TRACK_USAGE": "false",
        "LIVEPATCH_ROCM_PINNED_ALLOCATOR": "on",
        "LIVEPATCH_ROCM_PINNED_ALLOCATOR_STEP_GB": "1",
    }
    command = [python, "-c", CODE, str(gib), str(DRIVERS)]
    done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measured(gib_sizes: Sequence[int] = (1, 4, 16), release: str | None = None, python: Path | None = None) -> Figures:
    """A row for each final size that there is room for."""
    release = release or registry.pins("lmcache")[-1].version
    engine = str(python or environments.engine())
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "bundle"
        placing.write_directory(bundle.contents(catalogue.load()), place)
        for gib in gib_sizes:
            if gib + 2 > free_gib():
                print(f"{gib} GiB left out: {free_gib():.1f} GiB are free", file=sys.stderr)
                continue
            stock, patched = (measure(engine, release, path, gib) for path in (None, place))
            cells = [f"{figures.duration(one['settled_s'])}, {one['resident_mib']:,} MiB" for one in (stock, patched)]
            rows.append([f"{gib} GiB", *cells, *(f"{one['after_mib']:,} MiB" for one in (stock, patched))])
    columns = (
        f"LMCache {release}, final size",
        "settled after, resident then, stock",
        "patched",
        "with 512 MiB allocated, stock",
        "patched",
    )
    sizes = " ".join(map(str, gib_sizes))
    return Figures(f"python -m vllm_livepatch.tools.bench.pinned_allocator --gb {sizes}", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="default: the engine's cached environment")
    parser.add_argument("--release", default=registry.pins("lmcache")[-1].version)
    parser.add_argument("--gb", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args()
    measured(options.gb, options.release, options.python).show()


if __name__ == "__main__":
    main()
