"""The figures of the pages, measured again: what changed; --write keeps them and fills the pages.

    python -m vllm_livepatch.tools.bench [NAME]... [--write]
    python -m vllm_livepatch.tools.bench --long [NAME]... [--python PATH]

On a machine that does nothing else, in a checkout: the first for about a quarter of an hour; the second for hours, of
all that `long` has (engines, the lab, simulated worlds), which it always keeps.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
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
    long,
    moriio_wait,
    name_resolution,
    offline_check,
    pinned_allocator,
    reaper,
    scheduler_steps,
    startup,
    wrapped_call,
)
from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.errors import UserError

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
        name_resolution,
    )
}
WITH_ENGINES = ("idle_stepping",)
"""Kept likewise, each by its own command with --write."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(BENCHMARKS)}")
    parser.add_argument("--write", action="store_true", help="keep them in docs/figures, and fill the pages")
    parser.add_argument("--long", action="store_true", help="what takes minutes to hours: results below docs")
    parser.add_argument("--python", type=Path, help="with --long: an interpreter with vLLM and LMCache for a GPU")
    options = parser.parse_args()
    if options.long:
        _measure_long(options.names, options.python)
        return
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


def _measure_long(names: list[str], python: Path | None) -> None:
    try:
        for line in long.measure(CHECKOUT, names, python):
            print(line, flush=True)
    except UserError as error:
        print(f"bench: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except subprocess.CalledProcessError as error:
        print(f"bench: exit code {error.returncode} from {shlex.join(error.cmd)}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
