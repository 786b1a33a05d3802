"""The figures of the pages, measured again: what changed; --write keeps them and fills the pages.

    python -m vllm_livepatch.tools.bench [NAME]... [--write]

On a machine that does nothing else, for about a quarter of an hour, in a checkout. What takes longer has commands of
its own, in docs/benchmarks.md: idle_stepping, layerwise, the lab.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from vllm_livepatch.tools.bench import (
    block_transfer,
    bundle_size,
    changed_import,
    chunked_load,
    figures,
    git_apply,
    idle_steps,
    moriio_wait,
    offline_check,
    pinned_allocator,
    reaper,
    scheduler_steps,
    startup,
    wrapped_call,
)
from vllm_livepatch.tools.bench.figures import Figures

CHECKOUT = Path(__file__).resolve().parents[2]
BENCHMARKS: dict[str, Callable[[], Figures]] = {
    module.__name__.rpartition(".")[2]: module.measured
    for module in (
        startup,
        wrapped_call,
        scheduler_steps,
        reaper,
        moriio_wait,
        offline_check,
        block_transfer,
        pinned_allocator,
        changed_import,
        bundle_size,
        git_apply,
        idle_steps,
        chunked_load,
    )
}
WITH_ENGINES = ("idle_stepping",)
"""Kept likewise, each by its own command with --write."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(BENCHMARKS)}")
    parser.add_argument("--write", action="store_true", help="keep them in docs/figures, and fill the pages")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    for name in options.names or BENCHMARKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        file = CHECKOUT / figures.PLACE / f"{name}.json"
        old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        new = figures.kept(BENCHMARKS[name](), CHECKOUT)
        for line in figures.changes(old, new):
            print(f"{name}: {line}", flush=True)
        if options.write:
            figures.write(new, name, CHECKOUT)
    if options.write:
        figures.fill(CHECKOUT)


if __name__ == "__main__":
    main()
