"""`vllm-livepatch lab`: options, errors for people, and what is shown at the end (of the demo, too)."""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import typer
from rich.console import Console
from vllm_livepatch.sitecustomize.decision import variable
from vllm_livepatch.tools import user_cache
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle import verdicts
from vllm_livepatch.tools.lab import environments, faults, given, lab, loads, printing, report, summary, topology
from vllm_livepatch.tools.lab.client import RequestFailed
from vllm_livepatch.tools.lab.options import LMCACHE, VLLM
from vllm_livepatch.tools.lab.supervisor import PartFailed


def command(
    name: str,
    vllm: str | None,
    lmcache: str | None,
    python: Path | None,
    load: str,
    fault: list[str] | None,
    patches: str,
    setting: list[str] | None,
    env: list[str] | None,
    patch_dir: list[Path] | None,
    settings: list[str] | None,
    compare: bool,
    alone: bool,
    setup: list[str] | None,
    rounds: int,
    seconds: float,
    clients: int,
    seed: int,
    out: Path | None,
    dry_run: bool,
    form: str | None,
) -> None:
    """What `lab` does, given the options of `options.lab`. Raises UserError."""
    described = topology.set_up(topology.load(name), settings or ())
    asked = loads.parse(load)
    chosen = [word for word in patches.split(",") if word]
    entries = catalogue.load(patch_dir or ())
    ride = [change for change in described.changes if change in entries]
    bundled = catalogue.choose(entries, [*chosen, *ride] if chosen else [])
    toggles = {variable(patch): "on" for patch in chosen} | _variables("--set", setting or ())
    for variable_ in (environment := _variables("--env", env or ())):
        if variable_ == "PYTHONPATH" or variable_.startswith("LIVEPATCH"):
            raise UserError(f"--env {variable_}: a setup has its own; --set VARIABLE=VALUE sets the patches' variables")
    wrong = verdicts.unusable([entry.patch for entry in (*bundled.values(), *_own(described, fault or ()))], toggles)
    if wrong:
        raise UserError(f"--set: {'; '.join(wrong)}")
    hang_up, planned = faults.parse(fault or (), [role.name for role in described.roles])
    inside = faults.injected(fault or ())
    revisions = _revisions(setup or ())
    if hang_up and isinstance(asked, loads.Bench):
        raise UserError(f"--fault {faults.DISCONNECTS}: vllm bench serve hangs up on nobody; use another --load")
    if alone and isinstance(asked, loads.Bench):
        raise UserError("--alone: vllm bench serve compares no answers; use another --load")
    if form is not None:
        if form not in printing.FORMS:
            raise UserError(f"--print {form}: there are {', '.join(printing.FORMS)}")
        print(printing.FORMS[form](described, toggles), end="")
        return
    if python and (vllm or lmcache):
        raise UserError("--python has its own vLLM and LMCache: leave out --vllm and --lmcache")
    engines = given.ask(python) if python else None
    options = lab.Options(
        topology=described,
        out=out or Path("OUT"),
        load=asked,
        faults=tuple(planned),
        disconnects=hang_up,
        alone=alone,
        injected=inside,
        setups=(*(["stock"] if compare else []), *revisions, "patched"),
        revisions=revisions,
        rounds=rounds,
        seconds=seconds,
        clients=clients,
        patches=tuple(chosen),
        patch_dirs=tuple(entry.resolve() for entry in patch_dir or ()),
        toggles=toggles,
        environment=environment,
        seed=seed,
        vllm=engines.vllm if engines else vllm or VLLM,
        lmcache=engines.lmcache if engines else lmcache or LMCACHE,
        given=engines,
    )
    if dry_run:
        print(_commands(options, [load, *(fault or ())]))
        return
    options = replace(options, out=directory(out, "lab"))
    conclude(conduct("lab", options), options.out)


def directory(out: Path | None, name: str) -> Path:
    """The output directory, made: ``out``, or one of its own for this run of ``name``. Raises UserError."""
    place = out or user_cache.directory() / name / time.strftime("%Y%m%d-%H%M%S")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{place} cannot be the output directory: {error.strerror}") from error
    return place.resolve()


def conduct(name: str, options: lab.Options) -> dict[str, Any]:
    """Run it; what goes wrong is a line of the command ``name`` on stderr, and an exit code."""
    try:
        return asyncio.run(_interruptible(options))
    except (PartFailed, environments.InstallationError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except subprocess.CalledProcessError as error:
        if error.returncode != 2:  # bad input, and said so
            print(f"{name}: exit code {error.returncode} from {' '.join(error.cmd[2:])}", file=sys.stderr)
        raise typer.Exit(2 if error.returncode == 2 else 1) from error
    except (aiohttp.ClientError, asyncio.TimeoutError, RequestFailed) as error:
        why = str(error) or type(error).__name__
        print(f"{name}: a request outside the load failed: {why}; logs are in {options.out}", file=sys.stderr)
        raise typer.Exit(1) from error
    except (asyncio.CancelledError, KeyboardInterrupt) as error:
        print(f"{name}: stopped", file=sys.stderr)
        raise typer.Exit(130) from error


def conclude(result: dict[str, Any], place: Path) -> None:
    """Write figures and pictures into ``place``; show why a part died, the table, the checks, and what is where."""
    report.write(result, place / "result.json")
    report.completions(result, place / "completions.png")
    summary.picture(result, place / "blocks.png")
    for setup, found in result["setups"].items():
        if not found["survived"]:
            print(f"{setup}: {found['death']}. From its log:")
            print("\n".join(f"  | {line}" for line in found["assertion"] or found["log_tail"]), end="\n\n")
    Console(width=None if sys.stdout.isatty() else 80).print(summary.table(result))
    for check in result.get("checks", ()):
        print(f"{'ok    ' if check['passed'] else 'FAILED'}  {check['check']}")
    print(f"\npictures: {place / 'completions.png'}, {place / 'blocks.png'}\nfigures:  {place / 'result.json'}")
    print(f"logs:     {', '.join(str(place / setup) for setup in result['setups'])}\ntook {result['seconds']:.0f} s")


def _variables(option: str, texts: Any) -> dict[str, str]:
    """The `VARIABLE=VALUE` texts of an option as a table. Raises UserError."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"{option} {text}: write VARIABLE=VALUE")
        found[name] = value
    return found


def _revisions(texts: Any) -> dict[str, str]:
    """`NAME=REVISION` texts as a table. Raises UserError."""
    found = {}
    for text in texts:
        name, _, revision = text.partition("=")
        if not revision or not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name) or name in ("stock", "patched", "model"):
            raise UserError(
                f"--setup {text}: write NAME=REVISION, with a name of small letters, digits, dots and dashes"
            )
        found[name] = revision
    return found


def _own(described: topology.Topology, texts: Sequence[str]) -> list[catalogue.Entry]:
    """The lab's patches that ride in the bundle."""
    names = {*described.changes, *faults.injected(texts)}
    entries = (catalogue.read(file.parent) for file in sorted(faults.PATCHES.glob("*/patch.toml")))
    return [entry for entry in entries if entry.patch.name in names]


def _commands(options: lab.Options, asked: Sequence[str]) -> str:
    """The commands of a run on this machine, with the variables that differ from an ordinary environment."""
    described, variables = options.topology, lab.variables(options, "patched")
    deployed = topology.local(
        described,
        Path("PYTHON"),
        Path("MODEL"),
        {**options.environment, "PYTHONPATH": "BUNDLE", **variables},
        Path("ROUTER/python"),
        options.device,
    )
    usual = topology.environment(Path("PYTHON"), {})
    lines = [f"# {described.title}: vLLM {options.vllm}, LMCache {options.lmcache}", f"# clients ask {deployed.url}"]
    lines.append(f"# load and faults: {', '.join(asked)}")
    if "stock" in options.setups:
        names = ", ".join(lab.variables(options, "stock"))
        lines.append(f"# the stock setup has {f'only {names}, and a bundle of these' if names else 'no bundle'}")
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
