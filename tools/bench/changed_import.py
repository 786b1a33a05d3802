"""What it costs to import modules that a diff changes, over their import as they came; in turn, medians.

    python -m vllm_livepatch.tools.bench.changed_import [--release X] [--rounds N] [--first] [--engine-python PATH]

Each row is one fresh interpreter that imports the real modules of a release. `cached`: changed sources, their bytecode
and fingerprints are in the user's cache, as in every process after the first; `first` (with --first): they are not.

Accidents, each worth more than what is measured, are kept out of all of them. The garbage collector is off: where its
full passes fall is chance. CPython 3.11 keeps Python frames in chunks of 16 KiB, and maps and unmaps the next one
at every call of a loop that happens to stand on a chunk's end; any two frames more or less on the stack move that place
to another loop (one of transformers' takes 1.2 s instead of 0.5 s there, in stock and patched alike). So all is
imported from a frame that asks for one chunk that is large enough. And memory comes from the C library, which is asked
to give none back: that takes noise out; the ratio without it is near (docs/diffs.md).
"""

from __future__ import annotations

import argparse
import difflib
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools.bench import figures
from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.diffs import folder, judging, reading
from vllm_livepatch.tools.lab import environments
from vllm_livepatch.tools.releases import sources

MODULES = ("vllm.v1.core.sched.scheduler", "vllm.v1.core.kv_cache_manager", "vllm.v1.core.kv_cache_utils")
NAME = "bench-change"
PROGRAM = """
import gc
gc.disable()
def load():
    import {modules}
load.__code__ = load.__code__.replace(co_stacksize={words})
load()
"""
MEMORY = {
    "PYTHONMALLOC": "malloc",
    "PYTHONHASHSEED": "0",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
STACK_WORDS = 140_000
"""Of 8 bytes: the chunk for such a frame is 2 MiB, and what is left of it, 0.9 MiB, is for the frames of the import."""


def patch_of(release: str, place: Path) -> None:
    """A bundle in `place`/bundle whose one diff adds a line to the end of each module."""
    tree = Tree([str(sources.site_packages("vllm", release))])
    lines: list[str] = []
    for module in MODULES:
        text, file = tree.source(module) or "", module.replace(".", "/") + ".py"
        after = f"{text}\n\nCHANGED = True\n"
        lines += difflib.unified_diff(text.splitlines(True), after.splitlines(True), f"a/{file}", f"b/{file}")
    diff = reading.parse("".join(lines).encode())
    folder.write(diff, NAME, "the benchmark", [judging.judge(diff, release, tree.source)], place / "patches")
    entries = catalogue.choose(catalogue.load([place / "patches"]), [NAME])
    placing.write_directory(bundle.contents(entries), place / "bundle")


def imported(python: Path, path: list[Path], cache: Path, state: Path) -> tuple[float, float]:
    """Wall and processor seconds of one process that imports the modules."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LIVEPATCH", "PYTHON", "VLLM"))}
    environ = {
        **kept,
        **MEMORY,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "LIVEPATCH_STATE_DIR": str(state),
        "XDG_CACHE_HOME": str(cache),
        "OMP_NUM_THREADS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_TARGET_DEVICE": "cpu",
    }
    command = [str(python), "-c", PROGRAM.format(words=STACK_WORDS, modules=", ".join(MODULES))]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(release: str, python: Path, rounds: int, first: bool, place: Path) -> dict[str, list[tuple[float, float]]]:
    """Every row once a round, in turn and back, after a round that does not count."""
    source, changed = sources.site_packages("vllm", release), place / "bundle"
    times: dict[str, list[tuple[float, float]]] = {"stock": [], "changed, cached": []}
    if first:
        times["changed, first"] = []
    for turn in range(rounds + 1):
        shutil.rmtree(place / "empty", ignore_errors=True)
        rows = {
            "stock": ([source], place / "cache"),
            "changed, cached": ([changed, source], place / "cache"),
            "changed, first": ([changed, source], place / "empty"),
        }
        for name in list(times) if turn % 2 else reversed(list(times)):
            path, cache = rows[name]
            taken = imported(python, path, cache, place / "state")
            if turn:
                times[name].append(taken)
    return times


def measured(release: str = "0.32.0", rounds: int = 6, first: bool = False, python: Path | None = None) -> Figures:
    """Medians; the ratio over stock round by round, by wall clock and by processor time."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        patch_of(release, place)
        times = measure(release, python or environments.engine(), rounds, first, place)
    stock = times["stock"]
    rows = []
    for name, taken in times.items():
        mine, other = list(zip(*taken, strict=True)), list(zip(*stock, strict=True))
        medians = [figures.duration(statistics.median(clock)) for clock in mine]
        rows.append([name, *medians, *map(figures.ratio, mine, other)])
    title = f"import of {len(MODULES)} modules, vLLM {release}"
    columns = (title, "wall clock", "processor", "over stock, wall clock", "over stock, processor")
    words = f"--release {release} --rounds {rounds}{' --first' if first else ''}"
    return Figures(f"python -m vllm_livepatch.tools.bench.changed_import {words}", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.changed_import", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--release", default="0.32.0")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--first", action="store_true", help="also with an empty cache")
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    options = parser.parse_args()
    measured(options.release, options.rounds, options.first, options.engine_python).show()


if __name__ == "__main__":
    main()
