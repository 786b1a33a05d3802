"""Time to first token and throughput of stored prompts through a small pool: no offload, the patch off, and on.

    python -m vllm_livepatch.tools.bench.chunked_load [--rounds N] [--prompts N] [--pool N] [--arms ARM...] [--out FILE]
    python -m vllm_livepatch.tools.bench.chunked_load --kept docs/chunked-load.json --write docs/chunked-load.md

Real engines (vLLM on CPU, a tiny model), each with a pool of a few prompts; the last two with a real LMCache server.
Every prompt is asked for once. Then, each round, an engine's own prefix cache is emptied and all prompts are asked for
at once. The arms take turns, so what disturbs the machine disturbs all of them. Outputs are compared between arms.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.commands import matrix
from vllm_livepatch.tools.lab import environments, model, topology
from vllm_livepatch.tools.lab.client import Client, Said
from vllm_livepatch.tools.lab.supervisor import Supervisor

VLLM = "0.32.0"
PATCH = "chunked-lmcache-load"
ARMS = ("none", "off", "on")
PROMPT_TOKENS = 16 * topology.CHUNK_SIZE + 28
OUTPUT_TOKENS = 16
PART_TOKENS = 256
HITS = "vllm:external_prefix_cache_hits_total"


def deployment(arm: str, python: Path, tiny: Path, pool: int, variables: Mapping[str, str]) -> topology.Deployment:
    """The parts of an arm; its engine's pool holds `pool` prompts."""
    # Engines share the machine: threads bound to cores would spin where another engine computes.
    shared = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", **environments.vllm_cache(VLLM)}
    deployed = topology.local(topology.load("lmcache"), python, tiny, {**shared, **variables})
    server, engine = deployed.parts
    blocks = pool * -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // topology.BLOCK_SIZE) + 1  # one is never given out
    command = (*engine.command, "--num-gpu-blocks-override", str(blocks))
    if arm == "none":
        place = command.index("--kv-transfer-config")
        alone = dataclasses.replace(engine, command=command[:place] + command[place + 2 :], beside=False)
        return topology.Deployment((alone,), deployed.url)
    return topology.Deployment((server, dataclasses.replace(engine, command=command)), deployed.url)


async def emptied(client: Client, seconds: float = 30.0) -> None:
    """Empty the engine's own prefix cache, as soon as no request's blocks are still being stored."""
    until = time.monotonic() + seconds
    while not await client.reset_prefix_cache():
        if time.monotonic() > until:
            raise TimeoutError("the engine does not let go of its blocks")
        await asyncio.sleep(0.1)


async def measure(
    arms: Sequence[str], python: Path, rounds: int, prompts: int, pool: int, place: Path
) -> dict[str, dict[str, Any]]:
    """Each arm's figures. Raises PartFailed where a server dies."""
    tiny = model.make(place / "model", seed=1)
    asked = [(prompt,) for prompt in model.prompts(prompts, PROMPT_TOKENS, seed=1)]
    injected = place / "bundle"
    placing.write_directory(bundle.contents(catalogue.load()), injected)
    settings = {"off": "off", "on": "on"}
    deployed = {}
    for arm in arms:
        variables = {
            "PYTHONPATH": str(injected),
            "LIVEPATCH_STATE_DIR": str(place / f"state-{arm}"),
            "LIVEPATCH_CHUNKED_LMCACHE_LOAD": settings.get(arm, "off"),
            "LIVEPATCH_CHUNKED_LMCACHE_LOAD_MAX_TOKENS": str(PART_TOKENS),
        }
        deployed[arm] = deployment(arm, python, tiny, pool, variables if arm in settings else {})
    figures: dict[str, dict[str, Any]] = {arm: {"rounds": []} for arm in arms}
    supervisors = {arm: Supervisor(place / arm, lambda line: print(line, file=sys.stderr)) for arm in arms}
    try:
        for supervisor in supervisors.values():
            await supervisor.__aenter__()
        await asyncio.gather(*(supervisors[arm].start(deployed[arm].parts) for arm in arms))
        for arm in arms:
            async with Client(deployed[arm].url, topology.MODEL_NAME, 120) as client:
                figures[arm]["outputs"] = [await client.complete(prompt, OUTPUT_TOKENS) for prompt in asked]
        for _ in range(rounds):
            for arm in arms:
                one = supervisors[arm].guard(play(deployed[arm].url, asked, figures[arm]["outputs"], arm != "none"))
                figures[arm]["rounds"].append(await one)
        for arm in arms:
            figures[arm]["counters"] = await settled(place / f"state-{arm}")
    finally:
        for supervisor in supervisors.values():
            await supervisor.__aexit__(None, None, None)
    return figures


async def play(url: str, prompts: Sequence[Said], outputs: Sequence[str], offload: bool) -> dict[str, float]:
    """One round of one arm: all prompts at once, none of them in the engine's own cache."""
    async with Client(url, topology.MODEL_NAME, 120) as client:
        await emptied(client)
        before = await client.metric(HITS) if offload else 0.0
        begun = time.monotonic()
        answers = await asyncio.gather(*(client.stream(prompt, OUTPUT_TOKENS) for prompt in prompts))
        seconds = time.monotonic() - begun
        loaded = (await client.metric(HITS) if offload else 0.0) - before
    times = sorted(pieces[0] for _, pieces in answers)
    return {
        "first_token_median": statistics.median(times),
        "first_token_p95": times[int(0.95 * (len(times) - 1))],
        "prompts_a_second": len(prompts) / seconds,
        "hit_share": loaded / (len(prompts) * (PROMPT_TOKENS // topology.CHUNK_SIZE * topology.CHUNK_SIZE)),
        "other_outputs": sum(text != expected for (text, _), expected in zip(answers, outputs, strict=True)),
    }


async def settled(state: Path) -> dict[str, int]:
    """The counters when they move no more: a process writes its report within a second of a count."""
    found, before = counters(state), None
    while found != before:
        await asyncio.sleep(2)
        found, before = counters(state), found
    return found


def counters(state: Path) -> dict[str, int]:
    """The patch's counters, added up over an arm's processes."""
    total: Counter[str] = Counter()
    for file in state.glob("*.json"):
        for patch in json.loads(file.read_text(encoding="utf-8"))["patches"]:
            if patch["name"] == PATCH:
                total.update(patch["counters"])
    return dict(total)


def rows(figures: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """What the columns are, and an arm a row: medians over the rounds, and between which values these were."""
    found = [["arm", "first token, median (rounds)", "p95", "prompts a second (rounds)", "loaded of what is stored"]]
    found[0].append("other outputs")
    for arm, entry in figures.items():
        of = {key: sorted(values[key] for values in entry["rounds"]) for key in entry["rounds"][0]}
        middle = {key: statistics.median(values) for key, values in of.items()}
        first, rate = of["first_token_median"], of["prompts_a_second"]
        found.append(
            [
                arm,
                f"{middle['first_token_median']:.2f} s ({first[0]:.2f} to {first[-1]:.2f})",
                f"{middle['first_token_p95']:.2f} s",
                f"{middle['prompts_a_second']:.1f} ({rate[0]:.1f} to {rate[-1]:.1f})",
                f"{middle['hit_share']:.1%}" if arm != "none" else "",
                f"{sum(of['other_outputs']):.0f}",
            ]
        )
    return found


def show(figures: Mapping[str, Mapping[str, Any]]) -> None:
    """The rows as a table, and what the patch counted."""
    columns, *arms = rows(figures)
    table = Table(*columns)
    for row in arms:
        table.add_row(*row)
    Console().print(table)
    for arm, found in figures.items():
        if found["counters"]:
            print(f"{arm}: {found['counters']}")


def markdown(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The rows for a document."""
    columns, *arms = rows(figures)
    lines = [columns, ["---"] * len(columns), *arms]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.chunked_load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32, help="asked for at once")
    parser.add_argument("--pool", type=int, default=4, help="prompts that the engine's KV cache holds")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--kept", type=Path, help="the JSON of an earlier run: nothing is run")
    parser.add_argument("--write", type=Path, help="a document, for its <!-- chunked-load --> table")
    options = parser.parse_args()
    if options.kept:
        figures = json.loads(options.kept.read_text(encoding="utf-8"))
    else:
        python = options.engine_python or environments.engine(VLLM, "0.5.6")
        with tempfile.TemporaryDirectory() as temporary:
            work = measure(options.arms, python, options.rounds, options.prompts, options.pool, Path(temporary))
            figures = asyncio.run(work)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if options.write:
        matrix.write(options.write, markdown(figures), "chunked-load")
    show(figures)


if __name__ == "__main__":
    main()
