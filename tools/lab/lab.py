"""One topology, brought up for real, loaded, hurt, and compared with and without the bundle.

Every arm is a fresh deployment of the same model, asked for the same prompts by the same clients, which draw the same
hang-ups, and hurt at the same moments. An undisturbed run of each prompt comes first: what it answered is what every
later answer is compared with.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from vllm_livepatch.tools import environments
from vllm_livepatch.tools.lab import faults, model, topology
from vllm_livepatch.tools.lab.faults import Fault
from vllm_livepatch.tools.lab.storm import Client, Load, RequestFailed, Tally, drained, storm, summary, warm
from vllm_livepatch.tools.lab.supervisor import PartFailed, Supervisor, together
from vllm_livepatch.tools.lab.topology import Deployment, Topology
from vllm_livepatch.tools.lab.watch import Watch

_REST_SECONDS = 4.0
"""What an engine costs that holds nothing, to compare with."""
_FIRST_TRIES = 5
"""A first transfer shakes hands with a peer that may still be busy: upstream gives that 5 s, then fails the request."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What is run. ``out`` is an existing directory."""

    topology: Topology
    out: Path
    faults: tuple[Fault, ...] = ()
    disconnects: bool = False
    arms: tuple[str, ...] = ("patched",)
    """`stock` and `patched`, in the order in which they run."""
    seconds: float = 60.0
    clients: int = 12
    prompts: int = 12
    prompt_tokens: int = 1052
    drain_seconds: float = 60.0
    """How long blocks may take to come back after the load, before what is still held is the result."""
    patches: tuple[str, ...] = ()
    """Names of the patches in the bundle; none: all."""
    toggles: Mapping[str, str] | None = None
    seed: int = 1
    vllm: str = "0.32.0"
    lmcache: str = "0.5.6"


async def run(options: Options) -> dict[str, Any]:
    """Run every arm; the result as it is written to ``result.json``.

    Raises ``PartFailed`` when a part does not come up, ``InstallationError`` when an environment cannot be built.
    """
    begun = time.monotonic()
    python = await asyncio.to_thread(environments.engine, options.vllm, options.lmcache)
    kinds = {role.kind for role in options.topology.roles}
    router = await asyncio.to_thread(environments.router) if "router" in kinds else None
    needed = [str(await asyncio.to_thread(environments.nixl, python))] if "nixl" in options.topology.name else []
    tiny = model.make(options.out / "model", seed=options.seed)
    load = Load(
        prompts=tuple(model.prompts(options.prompts, options.prompt_tokens, options.seed)),
        seconds=options.seconds,
        calm=0.0,
        clients=options.clients,
        disconnect_share=0.6 if options.disconnects else 0.0,
        streamed=True,
        seed=options.seed,
    )
    arms: dict[str, Any] = {}
    for name in options.arms:
        place = options.out / name
        injected = {"PYTHONPATH": os.pathsep.join(needed)} if needed else {}
        if name == "patched":
            injected = {**_bundle(options), **(options.toggles or {})}
            injected["PYTHONPATH"] = os.pathsep.join([injected["PYTHONPATH"], *needed])
        deployed = topology.local(options.topology, python, tiny, injected, router)
        tell = functools.partial(_tell, begun, name)
        async with Supervisor(place, tell) as parts:
            await parts.start(deployed.parts)
            arms[name] = await _course(parts, deployed, options, load, tell)
    shape = {key: value for key, value in asdict(load).items() if key != "prompts"}
    return {
        "topology": options.topology.name,
        "vllm": options.vllm,
        "lmcache": options.lmcache,
        "cores": os.cpu_count(),
        "load": {**shape, "prompts": options.prompts, "prompt_tokens": options.prompt_tokens},
        "faults": [asdict(fault) for fault in options.faults],
        "disconnects": options.disconnects,
        "settings": dict(options.topology.settings),
        "arms": arms,
        "seconds": round(time.monotonic() - begun, 1),
    }


async def _course(parts: Supervisor, deployed: Deployment, options: Options, load: Load, say: Say) -> dict[str, Any]:
    """One arm: warm up, load and hurt, wait for blocks to come back. The death of a part is a result, not an error."""
    tally = Tally()
    arm: dict[str, Any] = {"boot_seconds": parts.up_seconds(), "survived": True, "death": None}
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(deployed.url, topology.MODEL_NAME, load.request_timeout))
        urls = {
            role.name: part.health.removesuffix("/health")
            for role, part in zip(options.topology.roles, deployed.parts, strict=True)
            if role.kind == "engine"
        }
        watch = Watch(urls, parts.processes)
        engines = {
            name: await stack.enter_async_context(Client(url, topology.MODEL_NAME)) for name, url in urls.items()
        }
        try:
            expected = await parts.guard(_first(client, load))
            say(f"{len(expected)} prompts asked for; the load begins")
            tally.begun = time.monotonic()
            work = [storm(client, load, expected, tally, list(engines.values()))]
            work += [faults.play(fault, parts) for fault in options.faults]
            looking = asyncio.create_task(watch.look())
            try:
                await parts.guard(together(*work))
                hurt = {fault.part for fault in options.faults if fault.lasts is None and fault.kind == "kill"}
                left = {name: engine for name, engine in engines.items() if name not in hurt}
                say("the load is over; waiting for blocks to come back")
                arm["kv_usage_at_end"], arm["back_after"] = await parts.guard(_back(left, load, options.drain_seconds))
                await parts.guard(asyncio.sleep(_REST_SECONDS))
            finally:
                looking.cancel()
        except PartFailed as failed:
            if not tally.events:
                raise
            say(f"{failed.part} {failed.what}")
            arm |= {"survived": False, "death": f"{failed.part} {failed.what}", "log_tail": failed.tail}
            arm["died_after"] = round(tally.elapsed(), 1)
    arm |= summary(tally)
    arm["goodput"] = round(arm["completed"] / load.seconds, 3)
    for name, values in (("first_token", tally.first_tokens), ("between_tokens", tally.gaps)):
        arm[name] = {share: _quantile(values, share) for share in (0.5, 0.9, 0.99)} if values else None
    arm |= watch.result()
    arm["status"] = _status(options.out / "state") if parts.directory.name == "patched" else []
    return arm


async def _first(client: Client, load: Load) -> dict[str, str]:
    """Each prompt's undisturbed answer."""
    for remaining in reversed(range(_FIRST_TRIES)):
        try:
            await client.complete(load.prompts[0], 1)
            break
        except (aiohttp.ClientError, RequestFailed):
            if not remaining:
                raise
    return await warm(client, load)


async def _back(engines: Mapping[str, Client], load: Load, deadline: float) -> tuple[dict[str, float], float]:
    """What each engine's KV usage comes down to, and the seconds until all were at 0 or the deadline was over."""
    begun = time.monotonic()
    left = {name: await drained(engine, load, deadline) for name, engine in engines.items()}
    return left, round(time.monotonic() - begun, 1)


def _tell(begun: float, arm: str, line: str) -> None:
    print(f"[{time.monotonic() - begun:4.0f} s] {arm}: {line}", file=sys.stderr, flush=True)


def _bundle(options: Options) -> dict[str, str]:
    """Write the bundle; what puts it into a process."""
    place, state = options.out / "bundle", options.out / "state"
    state.mkdir(exist_ok=True)
    _command_line("generate", "--out", str(place), *(word for name in options.patches for word in ("--patch", name)))
    return {"PYTHONPATH": str(place), "LIVEPATCH_STATE_DIR": str(state)}


def _status(state: Path) -> list[dict[str, Any]]:
    """What each live process says of its patches: name, state, counters."""
    processes = json.loads(_command_line("status", "--json", "--state-dir", str(state)))
    kept = ("name", "state", "reason", "counters")
    return [
        {"pid": process["pid"], "patches": [{key: patch[key] for key in kept} for patch in process["patches"]]}
        for process in processes
    ]


def _command_line(*arguments: str) -> str:
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _quantile(values: list[float], share: float) -> float:
    """The value below which ``share`` of the values lie, in seconds."""
    if len(values) == 1:
        return round(values[0], 4)
    return round(statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1], 4)
