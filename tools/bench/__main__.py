"""The figures of the pages, measured again: what changed; --write keeps them and fills the pages.

    python -m vllm_livepatch.tools.bench [NAME]... [--write]
    python -m vllm_livepatch.tools.bench --long [NAME]... [--python PATH]

On a machine that does nothing else, in a checkout: the first for about a quarter of an hour; the second for hours, of
all that `long` has (engines, the lab, simulated worlds), which it always keeps.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from vllm_livepatch.tools.commands import ending
from vllm_livepatch.tools.errors import UserError

with ending.needing("lab", "bench"):
    from vllm_livepatch.tools.bench import (
        block_transfer,
        bundle_size,
        changed_import,
        chunked_load,
        figures,
        git_apply,
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
    from vllm_livepatch.tools.lab import given

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
        chunked_load,
        name_resolution,
    )
}
WITH_ENGINES = ("idle_stepping",)
"""Kept likewise, each by its own command with --write."""


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help=f"Default: all of {', '.join(BENCHMARKS)}.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Keep them in tests/results, and fill the pages.")] = False,
    takes_long: Annotated[
        bool, typer.Option("--long", help="What takes minutes to hours: results below docs.")
    ] = False,
    python: Annotated[
        Path | None,
        typer.Option("--python", metavar="PATH", help="With --long: an interpreter with vLLM and LMCache for a GPU."),
    ] = None,
) -> None:
    """The figures of the pages, measured again: what changed."""
    if (takes_long or write) and not (CHECKOUT / figures.PLACE).is_dir():
        raise UserError("what is kept and written is a checkout's: this runs in none")
    if takes_long:
        _measure_long(names or [], python)
        return
    if python is not None:
        raise UserError("--python goes with --long")
    if unknown := [name for name in names or () if name not in BENCHMARKS]:
        raise UserError(f"there is no {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    for name in names or BENCHMARKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        file = CHECKOUT / figures.PLACE / f"{name}.json"
        old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        new = figures.kept(BENCHMARKS[name](), CHECKOUT)
        for line in figures.changes(old, new):
            print(f"{name}: {line}", flush=True)
        if write:
            figures.write(new, name, CHECKOUT)
    if write:
        figures.fill(CHECKOUT)


def _measure_long(names: list[str], python: Path | None) -> None:
    if python is not None:
        given.ask(python)
    try:
        for line in long.measure(CHECKOUT, names, python):
            print(line, flush=True)
    except subprocess.CalledProcessError as error:
        print(f"bench: exit code {error.returncode} from {shlex.join(error.cmd)}", file=sys.stderr)
        raise typer.Exit(1) from error


def main() -> None:
    ending.end_with(app, name="bench", bare=())


if __name__ == "__main__":
    main()
