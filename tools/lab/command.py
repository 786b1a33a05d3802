"""`vllm-livepatch lab`: options, errors for people, and what is shown at the end."""

from __future__ import annotations

import asyncio
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console
from vllm_livepatch.sitecustomize.decision import variable
from vllm_livepatch.tools import catalogue, environments
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import faults, lab, printing, report, summary, topology
from vllm_livepatch.tools.lab.storm import RequestFailed
from vllm_livepatch.tools.lab.supervisor import PartFailed


def command(
    name: Annotated[str, typer.Argument(metavar="TOPOLOGY", help=f"One of: {', '.join(topology.names())}.")],
    vllm: Annotated[str, typer.Option("--vllm", metavar="X", help="A release that has a CPU build.")] = "0.32.0",
    lmcache: Annotated[str, typer.Option("--lmcache", metavar="Y")] = "0.5.6",
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", help="disconnects, kill-PART or stop-PART, with @SECONDS and +SECONDS; repeatable."),
    ] = None,
    patches: Annotated[
        str, typer.Option("--patches", metavar="NAME,...", help="Only these, turned on. Default: all, as they decide.")
    ] = "",
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="VARIABLE=VALUE", help="For the patched arm; repeatable.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--with", metavar="NAME=NUMBER", help="A setting of the topology; repeatable.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Stock beside patched, in one run.")] = False,
    seconds: Annotated[float, typer.Option(min=5, help="How long the load lasts.")] = 60,
    clients: Annotated[int, typer.Option(min=1)] = 12,
    seed: Annotated[int, typer.Option(help="Of the model, the prompts and the load.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="For logs, picture and JSON.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the commands, as they would run here.")
    ] = False,
    form: Annotated[
        str | None,
        typer.Option("--print", metavar="FORM", help=f"For a real cluster instead: {', '.join(printing.FORMS)}."),
    ] = None,
) -> None:
    """A real topology on this machine: engines, LMCache server, transports and router, with load and faults."""
    described = topology.set_up(topology.load(name), settings or ())
    chosen = [word for word in patches.split(",") if word]
    catalogue.choose(catalogue.load(), chosen)
    toggles = {variable(patch): "on" for patch in chosen} | _settings(setting or ())
    hang_up, planned = faults.parse(fault or (), [role.name for role in described.roles])
    if form is not None:
        if form not in printing.FORMS:
            raise UserError(f"--print {form}: there are {', '.join(printing.FORMS)}")
        print(printing.FORMS[form](described, toggles), end="")
        return
    if dry_run:
        print(_commands(described, vllm, lmcache))
        return
    if described.stopped_by:
        raise UserError(f"{name} cannot run here: {described.stopped_by}; --dry-run and --print show what would run")
    place = out or environments.cache_directory() / "lab" / time.strftime("%Y%m%d-%H%M%S")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{place} cannot be the output directory: {error.strerror}") from error
    options = lab.Options(
        topology=described,
        out=place.resolve(),
        faults=tuple(planned),
        disconnects=hang_up,
        arms=("stock", "patched") if compare else ("patched",),
        seconds=seconds,
        clients=clients,
        patches=tuple(chosen),
        toggles=toggles,
        seed=seed,
        vllm=vllm,
        lmcache=lmcache,
    )
    try:
        result = asyncio.run(_interruptible(options))
    except (PartFailed, environments.InstallationError) as error:
        print(f"lab: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except subprocess.CalledProcessError as error:
        raise typer.Exit(error.returncode) from error
    except (aiohttp.ClientError, RequestFailed) as error:
        print(f"lab: a request before the load failed: {error}; logs are in {place}", file=sys.stderr)
        raise typer.Exit(1) from error
    except (asyncio.CancelledError, KeyboardInterrupt) as error:
        print("lab: stopped", file=sys.stderr)
        raise typer.Exit(130) from error
    report.write(result, place / "result.json")
    summary.picture(result, place / "blocks.png")
    Console().print(summary.table(result))
    print(f"picture: {place / 'blocks.png'}\nfigures: {place / 'result.json'}\nlogs:    {place}")


def _settings(texts: Any) -> dict[str, str]:
    """`VARIABLE=VALUE` texts as a table. Raises UserError."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--set {text}: write VARIABLE=VALUE")
        found[name] = value
    return found


def _commands(described: topology.Topology, vllm: str, lmcache: str) -> str:
    """The commands of a run on this machine, with the variables that differ from an ordinary environment."""
    deployed = topology.local(described, Path("PYTHON"), Path("MODEL"), {"PYTHONPATH": "BUNDLE"}, Path("ROUTER/python"))
    usual = topology.environment(Path("PYTHON"), {})
    lines = [f"# {described.title}: vLLM {vllm}, LMCache {lmcache}", f"# clients ask {deployed.url}"]
    for part in deployed.parts:
        own = [f"{key}={value}" for key, value in part.environment.items() if usual.get(key) != value and key != "PATH"]
        lines += ["", f"# {part.name}: serves when {part.health} answers", shlex.join([*own, *part.command])]
    return "\n".join(lines)


async def _interruptible(options: lab.Options) -> dict[str, Any]:
    """``lab.run``, cancelled (and so cleaned up after) by Ctrl-C, a closed terminal or a time-out's SIGTERM."""
    task = asyncio.ensure_future(lab.run(options))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task
