"""One topology, brought up for real, loaded, hurt, and compared with and without the bundle.

Every setup is a deployment of its own of the same model, asked for the same by the same clients, which draw the same
hang-ups, and hurt at the same moments. All setups are brought up together; their loads take turns. What a setup answers
undisturbed, before its load, is what all of its later answers are compared with.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_livepatch.sitecustomize.decision import variable
from vllm_livepatch.tools.lab import alone, environments, faults, loads, model, proxy, topology
from vllm_livepatch.tools.lab.bench import BenchServe
from vllm_livepatch.tools.lab.client import Client
from vllm_livepatch.tools.lab.faults import Fault
from vllm_livepatch.tools.lab.given import Given
from vllm_livepatch.tools.lab.options import LMCACHE, VLLM
from vllm_livepatch.tools.lab.revisions import ROOT, checkout, command_line
from vllm_livepatch.tools.lab.setups import LOADING, Setup, Work, falling_into, guarded
from vllm_livepatch.tools.lab.stages import Stages
from vllm_livepatch.tools.lab.storm import Turn, Visitors
from vllm_livepatch.tools.lab.supervisor import Supervisor, together
from vllm_livepatch.tools.lab.topology import Topology
from vllm_livepatch.tools.measured import measured_on

BUNDLES, ENVIRONMENTS = "making bundles", "building environments and a model"
"""What comes before the parts are started, as a person reads it."""
_TRANSPORTS = {"nixl": environments.nixl, "mooncake": environments.mooncake}
"""What is not in the engines' environment, by the word in a topology's name."""


@dataclass(frozen=True)
class Options:
    """What is run. ``out`` is an existing directory."""

    topology: Topology
    out: Path
    load: loads.Spec = field(default_factory=loads.Storm)
    faults: tuple[Fault, ...] = ()
    disconnects: bool = False
    alone: bool = False
    """Whether the right answers are those of an engine without a connector, which is asked before the setups."""
    injected: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Faults inside the engines of every setup: names of patches, and the variables that turn them on."""
    setups: tuple[str, ...] = ("patched",)
    """`stock`, `patched`, and names of ``revisions``."""
    revisions: Mapping[str, str] = field(default_factory=dict)
    """Setups whose bundle is as a revision of this checkout makes it, by name."""
    rounds: int = 1
    """In so many parts the load is cut; in each the setups take turns, in the other order than before."""
    seconds: float = 60.0
    clients: int = 12
    drain_seconds: float = 60.0
    """How long blocks may take to come back after the load, before what is still held is the result."""
    patches: tuple[str, ...] = ()
    """Names of the patches in the bundle; none: all."""
    patch_dirs: tuple[Path, ...] = ()
    """Directories of further patches for the bundle."""
    toggles: Mapping[str, str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables of engines and servers, in every setup."""
    seed: int = 1
    vllm: str = VLLM
    lmcache: str = LMCACHE
    given: Given | None = None
    """What engines and servers run with, of these releases; None: what the lab installs."""

    @property
    def device(self) -> str:
        """Where the engines' KV lies: ``cpu`` or ``cuda``."""
        return self.given.device if self.given else "cpu"


async def run(options: Options) -> dict[str, Any]:
    """Run every setup; the result as it is written to ``result.json``.

    Raises ``PartFailed`` when a part does not come up, ``InstallationError`` when an environment cannot be built,
    ``CalledProcessError`` when there is no bundle to be had, ``UserError`` where a revision is not there.
    """
    parts = len(options.setups) * len(options.topology.roles)
    with Stages(len((BUNDLES, ENVIRONMENTS)) + parts) as stages:
        return await _run(options, stages)


async def _run(options: Options, stages: Stages) -> dict[str, Any]:
    begun = time.monotonic()
    stages.begin(BUNDLES)
    injected = {name: _injected(options, name) for name in options.setups}
    stages.done(BUNDLES)
    stages.begin(ENVIRONMENTS)
    if options.given:
        python = options.given.python
    else:
        python = await asyncio.to_thread(environments.engine, options.vllm, options.lmcache)
    kinds = {role.kind for role in options.topology.roles}
    router = await asyncio.to_thread(environments.router) if "router" in kinds else None
    if "proxy" in kinds:
        await asyncio.to_thread(proxy.fetch)
    # An environment of the user's has its transport: one for its GPU, where it has one.
    transports = [find for name, find in _TRANSPORTS.items() if name in options.topology.name and not options.given]
    needed = [str(await asyncio.to_thread(find, python)) for find in transports]
    tiny = model.make(options.out / "model", seed=options.seed)
    stages.done(ENVIRONMENTS)
    rounded = _for_a_round(options)
    print(f"lab: logs are in {options.out}", file=sys.stderr)
    right: Sequence[Sequence[Turn]] = ()
    if options.alone and not isinstance(options.load, loads.Bench):
        deployment = topology.local(alone.ENGINE, python, tiny, _common(options), device=options.device)
        parts = Supervisor(options.out / "alone", functools.partial(_tell, begun, "alone"))
        right = await alone.answers(parts, deployment, options.load, options.seed)
    async with contextlib.AsyncExitStack() as stack:
        supervisors = {}
        for name in options.setups:
            tell = functools.partial(_tell, begun, name)
            up = functools.partial(_up, stages, name)
            supervisors[name] = await stack.enter_async_context(Supervisor(options.out / name, tell, up))
        deployed = {}
        for name in options.setups:
            variables = topology.with_path({**_common(options), **injected[name]}, needed)
            deployed[name] = topology.local(options.topology, python, tiny, variables, router, options.device)
        # Booting is importing, most of it on one core: several sides together take little longer than one.
        for name in supervisors:
            for part in deployed[name].parts:
                stages.begin(_starting(name, part.name))
        await together(*(parts.start(deployed[name].parts) for name, parts in supervisors.items()))
        stages.end()
        setups = []
        for name, parts in supervisors.items():
            tell = functools.partial(_tell, begun, name)
            setups.append(await stack.enter_async_context(Setup(name, parts, options.topology, deployed[name], tell)))
        found: dict[str, Any] = {}
        for number in range(options.rounds):
            for setup in setups[:: -1 if number % 2 else 1]:
                if setup.name in found:
                    continue
                others = [other for other in setups if other is not setup and other.name not in found]
                await guarded(others, _round(setup, number, rounded, tiny, python, right))
                if not setup.alive or number == options.rounds - 1:
                    found[setup.name] = setup.result(_planned(options))
                    found[setup.name]["status"] = _status(options, setup.name) if injected[setup.name] else []
                    await setup.parts.stop()
    return {
        **described(options),
        **measured_on(ROOT, options.given.gpu if options.given else None),
        "cores": os.cpu_count(),
        "setups": {name: found[name] for name in options.setups},
        "seconds": round(time.monotonic() - begun, 1),
    }


def _starting(setup: str, part: str) -> str:
    """What a stage is called."""
    return f"starting {setup} {part}"


def _up(stages: Stages, setup: str, part: str) -> None:
    stages.done(_starting(setup, part))


def described(options: Options) -> dict[str, Any]:
    """What was asked for, for JSON."""
    return {
        "topology": options.topology.name,
        "vllm": options.vllm,
        "lmcache": options.lmcache,
        "given": options.given is not None,
        "environment": dict(options.environment),
        "load": {**loads.described(options.load), "seconds": options.seconds, "clients": options.clients},
        "rounds": options.rounds,
        "seed": options.seed,
        "faults": [asdict(fault) for fault in options.faults],
        "disconnects": options.disconnects,
        "alone": options.alone,
        "injected": {name: dict(variables) for name, variables in options.injected.items()},
        "settings": dict(options.topology.settings),
        "revisions": dict(options.revisions),
        "patches": list(options.patches),
        "toggles": dict(options.toggles or {}),
    }


def _for_a_round(options: Options) -> Options:
    """The options with a round's share of the load."""
    seconds, load = options.seconds / options.rounds, options.load
    if isinstance(load, loads.Bench):
        load = replace(load, num=max(1, round((load.num or load.rate * options.seconds) / options.rounds)))
    return replace(options, seconds=seconds, load=load)


def _planned(options: Options) -> float:
    """How long the load is to last, in seconds."""
    if isinstance(options.load, loads.Bench):
        return options.load.num / options.load.rate if options.load.num else options.seconds
    return options.seconds + options.load.calm


async def _round(
    setup: Setup, number: int, options: Options, tiny: Path, python: Path, right: Sequence[Sequence[Turn]]
) -> None:
    if number == 0:
        await setup.prepare(*await _work(setup, options, tiny, python, right))
    last = number == options.rounds - 1
    await setup.load(options.seconds, falling_into(options.faults, number * options.seconds, options.seconds, last))
    if last and setup.alive:
        gone = [fault.part for fault in options.faults if fault.kind == "kill" and fault.lasts is None]
        await setup.settle(options.drain_seconds, gone)


async def _work(
    setup: Setup, options: Options, tiny: Path, python: Path, right: Sequence[Sequence[Turn]]
) -> tuple[Work, Client]:
    spec, engines = options.load, list(setup.engines.values())
    if isinstance(spec, loads.Bench):
        client = await setup.client(setup.url)
        environment = topology.environment(python, {})
        words = (setup.url, topology.MODEL_NAME, tiny)
        return BenchServe(setup.parts, python, environment, words, spec, options.seed, setup.tally, engines), client
    client = await setup.client(setup.url, spec.timeout)
    share = spec.share if options.disconnects else 0.0
    asked = replace(spec, share=share)
    return Visitors(client, asked, options.clients, options.seed, setup.tally, engines, right), client


def _tell(begun: float, setup: str, line: str) -> None:
    print(f"[{time.monotonic() - begun:4.0f} s] {setup}: {line}", file=sys.stderr, flush=True)


def variables(options: Options, setup: str) -> dict[str, str]:
    """The settings of the patches in a setup's bundle. The lab's own ride in it; of stock they are all of it."""
    own = _own_patches(options)
    found = {} if setup == "stock" else dict(options.toggles or {})
    found |= {key: value for entry in own.values() for key, value in entry.items()}
    if faults.LOST_PREFILLS in own:
        found[variable(faults.LOST_PREFILLS, "AFTER")] = str(options.out / setup / LOADING)
    return found


def _common(options: Options) -> dict[str, str]:
    """The variables of engines and servers in every setup, and of the engine that is alone."""
    return {**environments.vllm_cache(options.vllm), **options.environment}


def _injected(options: Options, setup: str) -> dict[str, str]:
    """What puts a setup's bundle into a process."""
    own = _own_patches(options)
    if setup == "stock" and not own:
        return {}
    filled = replace(options, patches=tuple(own)) if setup == "stock" else options
    return {**_bundle(filled, setup), **variables(options, setup)}


def _own_patches(options: Options) -> dict[str, Mapping[str, str]]:
    """The lab's patches of this run, faults and what the topology cannot run without: their variables by name."""
    return {**{name: {variable(name): "on"} for name in options.topology.changes}, **options.injected}


def _bundle(options: Options, setup: str) -> dict[str, str]:
    place, state = options.out / f"bundle-{setup}", _state(options, setup)
    state.mkdir(exist_ok=True)
    own = _own_patches(options)
    patches = [*options.patches, *(own if options.patches else ())]
    chosen = [word for patch in dict.fromkeys(patches) for word in ("--patch", patch)]
    directories = [*options.patch_dirs, *([faults.PATCHES] if own else [])]
    further = [word for directory in directories for word in ("--patch-dir", str(directory))]
    command_line("generate", "--out", str(place), *chosen, *further, path=_checkout(options, setup))
    return {"PYTHONPATH": str(place), "LIVEPATCH_STATE_DIR": str(state)}


def _status(options: Options, setup: str) -> list[dict[str, Any]]:
    """What each live process says of its patches: name, state, counters. All that it says goes into a file."""
    state = str(_state(options, setup))
    text = command_line("status", "--json", "--state-dir", state, path=_checkout(options, setup))
    (options.out / setup / "status.json").write_text(text, encoding="utf-8")
    kept = ("name", "state", "reason", "counters")
    return [
        {"pid": process["pid"], "patches": [{key: patch[key] for key in kept} for patch in process["patches"]]}
        for process in json.loads(text)
    ]


def _state(options: Options, setup: str) -> Path:
    """Where the reports of a setup's processes are."""
    return options.out / f"state-{setup}"


def _checkout(options: Options, setup: str) -> Path | None:
    return checkout(options.revisions[setup]) if setup in options.revisions else None
