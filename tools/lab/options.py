"""The options of `vllm-livepatch lab`. They can be read without what the lab itself needs, its extra."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from vllm_livepatch.tools.errors import UserError

TOPOLOGIES = Path(__file__).with_name("topologies")
VLLM, LMCACHE = "0.32.0", "0.5.6"
"""The releases of the lab's engines, where no others are asked for: the newest vLLM that has a CPU build."""
FORMS = ("kubernetes", "shell", "slurm")


def names() -> list[str]:
    """The topologies there are."""
    return sorted(file.stem for file in TOPOLOGIES.glob("*.toml"))


def lab(
    name: Annotated[str, typer.Argument(metavar="TOPOLOGY", help=f"One of: {', '.join(names())}.")],
    vllm: Annotated[
        str | None, typer.Option("--vllm", metavar="X", help=f"A release that has a CPU build. Default: {VLLM}.")
    ] = None,
    lmcache: Annotated[str | None, typer.Option("--lmcache", metavar="Y", help=f"Default: {LMCACHE}.")] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            "--python",
            metavar="PATH",
            help="An interpreter that has vLLM and LMCache, such as a container's with its GPU. Default: the lab "
            "installs both, for CPUs.",
        ),
    ] = None,
    load: Annotated[
        str,
        typer.Option(
            "--load",
            metavar="SPEC",
            help="storm, conversations or bench (vllm bench serve), with options: bench:rate=2,num=50, storm:api=chat.",
        ),
    ] = "storm",
    fault: Annotated[
        list[str] | None,
        typer.Option(
            "--fault",
            help="disconnects, late-reads[=SECONDS], late-requests[=SECONDS], link[=MB/S], "
            "lost-completions[=SHARE], lost-prefills[=SHARE], slow-lmcache[=SECONDS], slow-transfer[=SECONDS], "
            "or kill-PART or stop-PART with @SECONDS and +SECONDS; repeatable.",
        ),
    ] = None,
    patches: Annotated[
        str, typer.Option("--patches", metavar="NAME,...", help="Only these, turned on. Default: all, as they decide.")
    ] = "",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="VARIABLE=VALUE", help="For the patched setup; repeatable."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="VARIABLE=VALUE", help="For engines and servers of every setup; repeatable."),
    ] = None,
    patch_dir: Annotated[
        list[Path] | None, typer.Option("--patch-dir", metavar="DIR", help="Further patches; repeatable.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--with", metavar="NAME=NUMBER", help="A setting of the topology; repeatable.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Stock beside patched, in one run.")] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="The right answers are those of an engine that has no connector.")
    ] = False,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup",
            metavar="NAME=REVISION",
            help="Also the bundle of that git revision of this checkout; repeatable.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Cut the load into so many parts; the setups take turns.")] = 1,
    seconds: Annotated[float, typer.Option(min=5, help="How long the load lasts.")] = 60,
    clients: Annotated[int, typer.Option(min=1)] = 12,
    seed: Annotated[int, typer.Option(help="Of the model, the prompts and the load.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="For logs, picture and JSON.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the commands, as they would run here.")
    ] = False,
    form: Annotated[
        str | None,
        typer.Option("--print", metavar="FORM", help=f"For a real cluster instead: {', '.join(FORMS)}."),
    ] = None,
) -> None:
    """A real topology on this machine: engines, LMCache server, transports and router, with load and faults."""
    given = dict(locals())
    try:
        from vllm_livepatch.tools.lab.command import command
    except ImportError as error:
        raise UserError(f"the lab needs more packages (in the checkout: pip install '.[lab]'): {error}") from error
    command(**given)
