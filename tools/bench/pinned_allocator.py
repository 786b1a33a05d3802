"""Time to a usable host pool and its resident memory, LMCache's lazy allocator stock against patched.

    python -m vllm_livepatch.tools.bench.pinned_allocator --python PYTHON [--release 0.5.6] [--gb 1 4 16]

PYTHON has torch and what LMCache imports. The device's pin call is stood in for by touching each page, which is what
pinning does to resident memory; 64 MiB are pinned at the start, steps are 1 GiB, and 512 MiB are allocated. A final
size that free memory has no room for is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_livepatch.tools.bench.drivers import DRIVERS
from vllm_livepatch.tools.releases import registry, sources

GIB = 1 << 30
CODE = """
import ctypes, json, os, sys, time
sys.path.insert(0, sys.argv[2])
import pinned_allocator_double as double
print(json.dumps(double.measure(int(sys.argv[1]))), file=double.RESULT)
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


def main() -> int:
    """Print a line for each size and mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--release", default=registry.pins("lmcache")[-1].version)
    parser.add_argument("--gb", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bundle = Path(directory) / "bundle"
        generate = [sys.executable, "-m", "vllm_livepatch.tools.cli", "generate", "--out", str(bundle)]
        subprocess.run(generate, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print(f"{'final':>6} {'mode':8} {'manager s':>10} {'settled s':>10} {'resident MiB':>13} {'after 512 MiB':>14}")
        for gib in options.gb:
            if gib + 2 > free_gib():
                print(f"{gib} GiB left out: {free_gib():.1f} GiB are free", file=sys.stderr)
                continue
            for mode, path in (("stock", None), ("patched", bundle)):
                got = measure(options.python, options.release, path, gib)
                print(
                    f"{gib:3} GB {mode:8} {got['manager_s']:10.2f} {got['settled_s']:10.2f} "
                    f"{got['resident_mib']:13} {got['after_mib']:14}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
