"""What an engine costs that only holds a finished request's blocks for others, and what the holding costs others.

    python -m vllm_livepatch.tools.bench.idle_stepping [--vllm X] [--rounds N] [--setups ...] [--out FILE] [--write]

One prefill engine a setup (vLLM on CPU, a tiny model, NIXL), stock and with the bundle; a request's decode leg never
comes, so its blocks are held to the lease's end. The setups take turns, and the other engine is paused meanwhile. Each
round, of each process of the engine: processors that it uses while nothing is held, and while one request's blocks are.
Then: how long after the lease's end the blocks are back, and the time to first token of requests that come while
another's blocks are held.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from vllm_livepatch.tools.bench import figures
from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.lab import environments, model, topology
from vllm_livepatch.tools.lab.client import Client, Messages
from vllm_livepatch.tools.lab.supervisor import Supervisor

CHECKOUT = Path(__file__).resolve().parents[2]
SETUPS = ("stock", "patched")
USAGE = "vllm:kv_cache_usage_perc"
PROMPT_TOKENS = 20 * topology.BLOCK_SIZE + 5
_SETTLE_SECONDS = 1.5
"""After which a worker that hears nothing spins no more: upstream's is a second."""
_LOOK_SECONDS = 0.01
_TRIES = 6


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds: of the lease, over which processors are counted, and between requests that come during a hold."""

    lease: float
    window: float
    between: float
    requests: int


def deployment(python: Path, tiny: Path, lease: float, release: str, variables: Mapping[str, str]) -> Any:
    """The prefill engine of `pd-nixl`, alone."""
    pair = topology.set_up(topology.load("pd-nixl"), [f"lease={lease:g}"])
    (prefill,) = (role for role in pair.roles if role.name == "prefill")
    alone = dataclasses.replace(pair, ask="prefill", roles=(prefill,))
    shared = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", **environments.vllm_cache(release)}
    return topology.local(
        alone, python, tiny, topology.with_path({**shared, **variables}, [str(environments.nixl(python))])
    )


def seconds_used(parts: Supervisor) -> dict[str, float]:
    """Processor seconds of each process so far, by its name."""
    used: dict[str, float] = defaultdict(float)
    for entry in parts.processes():
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(entry["pid"]).cpu_times()
            used[kind(entry["name"], entry["command"])] += times.user + times.system
            if kind(entry["name"], entry["command"]) == "worker":
                # NIXL's threads beside it are busy whatever the engine does.
                first = next(thread for thread in psutil.Process(entry["pid"]).threads() if thread.id == entry["pid"])
                used["worker's main thread"] += first.user_time + first.system_time
    return dict(used)


def kind(name: str, command: Sequence[str]) -> str:
    """`core`, `worker`, `server` (which answers HTTP), or `other`."""
    title = " ".join([name, *command[:1]])
    for word, found in (("EngineCore", "core"), ("Worker", "worker"), ("python", "server")):
        if word in title:
            return "other" if "resource_tracker" in " ".join(command) else found
    return "other"


async def processors(parts: Supervisor, seconds: float) -> dict[str, float]:
    """How many processors each process used, over so many seconds."""
    before, begun = seconds_used(parts), time.monotonic()
    await asyncio.sleep(seconds)
    passed, after = time.monotonic() - begun, seconds_used(parts)
    return {name: (after[name] - before.get(name, 0.0)) / passed for name in after}


async def hold(url: str, prompt: Messages) -> None:
    """A request whose blocks are kept for a decode engine, which never comes."""
    body = {"model": topology.MODEL_NAME, "prompt": " ".join(prompt), "max_tokens": 1, "temperature": 0}
    async with aiohttp.ClientSession() as http:
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        async with http.post(f"{url}/v1/completions", json=body | {"kv_transfer_params": wanted}) as answer:
            answer.raise_for_status()
            if not (await answer.json()).get("kv_transfer_params"):
                raise RuntimeError("the engine does not keep the request's blocks")


async def back(client: Client, begun: float) -> float:
    """Seconds since `begun` until no block is held. The engine publishes what is held in its steps."""
    while await client.metric(USAGE) > 0:
        await asyncio.sleep(_LOOK_SECONDS)
    return time.monotonic() - begun


class Late(Exception):
    """The lease ended before what was to be measured within it had begun or ended, by this process's clock.

    An engine that steps all the time on a machine of two processors can leave this process none for that long.
    """


async def play(
    parts: Supervisor, url: str, prompts: Sequence[Messages], times: Times, dice: random.Random
) -> dict[str, Any]:
    """One round of one setup, which holds nothing before and after."""
    async with Client(url, topology.MODEL_NAME, 120) as client:
        await back(client, time.monotonic())  # of a turn that was late
        await client.reset_prefix_cache()
        await asyncio.sleep(_SETTLE_SECONDS)
        found: dict[str, Any] = {"idle": await processors(parts, times.window)}
        await hold(url, prompts[0])
        begun = time.monotonic()
        await asyncio.sleep(_SETTLE_SECONDS)
        found["holding"] = await processors(parts, times.window)
        if time.monotonic() - begun > times.lease:
            raise Late
        found["back"] = await back(client, begun) - times.lease
        found["first_token"] = {"idle": [], "holding": []}
        for name, firsts in found["first_token"].items():
            if name == "holding":
                await hold(url, prompts[1])
                begun = time.monotonic()
            for prompt in prompts[2 : 2 + times.requests]:
                await asyncio.sleep(times.between * dice.uniform(0.5, 1.5))
                if name == "holding" and time.monotonic() - begun > times.lease:
                    break  # the engine answered too late: this one, and the next, would come to one that holds nothing
                _, pieces = await client.stream(prompt, 1)
                firsts.append(pieces[0])
            if not firsts:
                raise Late
        await back(client, begun)
    return found


@contextlib.contextmanager
def stopped(others: Iterable[Supervisor]) -> Iterator[None]:
    """Other setups' engines make no use of the machine meanwhile: a NIXL worker's own thread is busy all the time."""
    paused = [(parts, name) for parts in others for name in {entry["part"] for entry in parts.processes()}]
    try:
        for parts, name in paused:
            parts.pause(name)
        yield
    finally:
        for parts, name in paused:
            parts.resume(name)


async def measure(
    setups: Sequence[str], release: str, python: Path, rounds: int, times: Times, place: Path
) -> dict[str, list[dict[str, Any]]]:
    """Each setup's rounds. Raises PartFailed where an engine dies."""
    tiny = model.make(place / "model", seed=1)
    prompts = [(prompt,) for prompt in model.prompts(2 + times.requests, PROMPT_TOKENS, seed=1)]
    injected = place / "bundle"
    placing.write_directory(bundle.contents(catalogue.load()), injected)
    deployed = {}
    for setup in setups:
        variables = {"PYTHONPATH": str(injected), "LIVEPATCH_STATE_DIR": str(place / "state")}
        deployed[setup] = deployment(python, tiny, times.lease, release, variables if setup == "patched" else {})
    found: dict[str, list[dict[str, Any]]] = {setup: [] for setup in setups}
    async with contextlib.AsyncExitStack() as stack:
        supervisors = {}
        for setup in setups:
            one = Supervisor(place / setup, lambda line: print(line, file=sys.stderr))
            supervisors[setup] = await stack.enter_async_context(one)
        await asyncio.gather(*(supervisors[setup].start(deployed[setup].parts) for setup in setups))
        for number in range(-1, rounds):  # the first one warms up
            dice = random.Random(number)
            for setup in setups[:: -1 if number % 2 else 1]:
                with stopped(supervisors[other] for other in setups if other != setup):
                    for late in range(_TRIES):
                        turn = play(supervisors[setup], deployed[setup].url, prompts, times, dice)
                        with contextlib.suppress(Late):
                            seen = await supervisors[setup].guard(turn) | {"late": late}
                            break
                    else:
                        raise SystemExit(f"{setup}: the lease ended too early {_TRIES} times: a longer one is needed")
                print(f"{setup}, round {number}: {json.dumps(seen)}", file=sys.stderr)
                if number >= 0:
                    found[setup].append(seen)
    return found


def table(found: Mapping[str, Sequence[Mapping[str, Any]]], release: str, command: str) -> Figures:
    """Medians over the rounds, and between which values these were."""
    rows = []

    def row(name: str, values: Mapping[str, Sequence[float]], form: str) -> None:
        cells = []
        for setup in found:
            ordered = sorted(values[setup])
            middle, least, most = (
                format(value, form) for value in (statistics.median(ordered), ordered[0], ordered[-1])
            )
            cells.append(f"{middle} ({least} to {most})")
        rows.append([f"{name}", *cells])

    for name in sorted({name for rounds in found.values() for one in rounds for name in one["holding"]}):
        more = {
            setup: [one["holding"].get(name, 0.0) - one["idle"].get(name, 0.0) for one in rounds]
            for setup, rounds in found.items()
        }
        row(f"{name}: processors more while holding", more, ".2f")
    back = {setup: [one["back"] for one in rounds] for setup, rounds in found.items()}
    row("blocks back after the lease's end, s", back, ".3f")
    for when, words in (("idle", "nothing held"), ("holding", "of a request that comes during a hold")):
        firsts = {
            setup: [t * 1e3 for one in rounds for t in one["first_token"][when]] for setup, rounds in found.items()
        }
        row(f"first token, {words}, ms", firsts, ".1f")
    row("turns begun anew", {setup: [one["late"] for one in rounds] for setup, rounds in found.items()}, ".0f")
    count = len(next(iter(found.values())))
    return Figures(command, (f"vLLM {release}, median (and range) of {count} rounds", *found), rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.idle_stepping", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", default="0.29.0")
    parser.add_argument("--lmcache", default="0.5.6", help="of the engine's environment; it is not used")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--lease", type=float, default=12.0, help="seconds for which blocks are held")
    parser.add_argument("--window", type=float, default=5.0, help="seconds over which processors are counted")
    parser.add_argument("--requests", type=int, default=8, help="that come during a hold")
    parser.add_argument("--out", type=Path, help="a file for each round's figures, as JSON")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/figures, and fill the page")
    options = parser.parse_args()
    python = environments.engine(options.vllm, options.lmcache)
    times = Times(options.lease, options.window, 0.5 * options.lease / options.requests, options.requests)
    with tempfile.TemporaryDirectory() as temporary:
        work = measure(options.setups, options.vllm, python, options.rounds, times, Path(temporary))
        found = asyncio.run(work)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    words = f"--vllm {options.vllm} --rounds {options.rounds} --lease {options.lease:g} --window {options.window:g}"
    made = table(found, options.vllm, f"python -m vllm_livepatch.tools.bench.idle_stepping {words} --write")
    if options.write:
        figures.keep(made, "idle_stepping", CHECKOUT)
    made.show()


if __name__ == "__main__":
    main()
