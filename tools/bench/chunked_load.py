"""Stored prompts through a small pool: no offload, the patch off, on, and on in small parts.

    python -m vllm_livepatch.tools.bench.chunked_load [--rounds N] [--prompts N] [--pool N] [--setups ...] [--model M]

Real engines (vLLM on CPU, random weights), each with a pool of a few prompts; all but the first with a real LMCache
server. Every prompt is asked for once. Then, each round, a few are asked for one by one, and all of them at once, each
time with the engine's own prefix cache emptied. The setups take turns, so what disturbs the machine disturbs them all.
Answers are compared with the setup's first ones, and those between setups. Ratios are round by round, over `off`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from vllm_livepatch.tools.bench.figures import Figures, duration, ratio
from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.lab import environments, model, topology
from vllm_livepatch.tools.lab.client import Client, Messages, RequestFailed
from vllm_livepatch.tools.lab.supervisor import Supervisor

VLLM = "0.32.0"
PATCH = "chunked-lmcache-load"
NO_OFFLOAD = "none"
PART_TOKENS = 256
SETUPS: dict[str, dict[str, str]] = {
    NO_OFFLOAD: {},
    "off": {"": "off"},
    "on": {"": "on"},
    "parts": {"": "on", "_MAX_TOKENS": str(PART_TOKENS)},
}
"""Each setup's settings of the patch, by the end of the variable's name."""
TITLES = {
    NO_OFFLOAD: "no offload",
    "off": "LMCache, `off`",
    "on": "LMCache, `on`",
    "parts": f"LMCache, `on`, parts of {PART_TOKENS} tokens",
}
PROMPT_TOKENS = 16 * topology.CHUNK_SIZE + 28
OUTPUT_TOKENS = (8, 16, 24, 32)
"""Of an answer, in turn: so that some begin while others run."""
HITS = "vllm:external_prefix_cache_hits_total"
STEPS = "vllm:iteration_tokens_total_count"
ALONE = 5
"""Prompts that are asked for one by one, in each round and by each setup."""

MODELS: dict[str, dict[str, int]] = {
    "wide": {
        "hidden_size": 512,
        "intermediate_size": 2560,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "tiny": {},
}
"""`wide`: a prefill takes about eleven times as long as its load. `tiny`: the lab's, where it takes hardly longer."""


def deployment(setup: str, python: Path, made: Path, pool: int, variables: Mapping[str, str]) -> topology.Deployment:
    """The parts of a setup; its engine's pool holds `pool` prompts."""
    # Engines share the machine: threads bound to cores would spin where another engine computes.
    shared = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", **environments.vllm_cache(VLLM)}
    deployed = topology.local(topology.load("lmcache"), python, made, {**shared, **variables})
    server, engine = deployed.parts
    blocks = pool * -(-(PROMPT_TOKENS + max(OUTPUT_TOKENS)) // topology.BLOCK_SIZE) + 1  # one is never given out
    command = (*engine.command, "--num-gpu-blocks-override", str(blocks))
    if setup == NO_OFFLOAD:
        place = command.index("--kv-transfer-config")
        alone = dataclasses.replace(engine, command=command[:place] + command[place + 2 :], beside=False)
        return topology.Deployment((alone,), deployed.url)
    return topology.Deployment((server, dataclasses.replace(engine, command=command)), deployed.url)


def variables(setup: str, injected: Path, state: Path) -> dict[str, str]:
    """What the processes of a setup get. Without offload: stock."""
    if not SETUPS[setup]:
        return {}
    toggles = {f"LIVEPATCH_CHUNKED_LMCACHE_LOAD{end}": value for end, value in SETUPS[setup].items()}
    return {"PYTHONPATH": str(injected), "LIVEPATCH_STATE_DIR": str(state), **toggles}


async def emptied(client: Client, seconds: float = 30.0) -> None:
    """Empty the engine's own prefix cache, as soon as no request's blocks are still being stored."""
    until = time.monotonic() + seconds
    while not await client.reset_prefix_cache():
        if time.monotonic() > until:
            raise TimeoutError("the engine does not let go of its blocks")
        await asyncio.sleep(0.1)


async def measure(
    setups: Sequence[str], python: Path, rounds: int, prompts: int, pool: int, shape: Mapping[str, int], place: Path
) -> dict[str, dict[str, Any]]:
    """Each setup's figures. Raises PartFailed where a server dies."""
    made = model.make(place / "model", seed=1, shape=shape)
    asked = [(prompt,) for prompt in model.prompts(prompts, PROMPT_TOKENS, seed=1)]
    injected = place / "bundle"
    placing.write_directory(bundle.contents(catalogue.load()), injected)
    deployed = {
        setup: deployment(setup, python, made, pool, variables(setup, injected, place / f"state-{setup}"))
        for setup in setups
    }
    figures: dict[str, dict[str, Any]] = {setup: {"rounds": [], "alone": []} for setup in setups}
    supervisors = {setup: Supervisor(place / setup, lambda line: print(line, file=sys.stderr)) for setup in setups}
    try:
        for supervisor in supervisors.values():
            await supervisor.__aenter__()
        await asyncio.gather(*(supervisors[setup].start(deployed[setup].parts) for setup in setups))
        stored = await asyncio.gather(*(answers(deployed[setup].url, asked) for setup in setups))
        for setup, outputs in zip(setups, stored, strict=True):
            figures[setup]["outputs"] = outputs
        for number in range(rounds):
            first = number % len(setups)  # what a setup leaves behind is not always the same one's affair
            turns = (*setups[first:], *setups[:first])
            for prompt in asked[:ALONE]:
                for setup in turns:
                    figures[setup]["alone"].append(await supervisors[setup].guard(alone(deployed[setup].url, prompt)))
            for setup in turns:
                one = supervisors[setup].guard(play(deployed[setup].url, asked, figures[setup]["outputs"], setup))
                figures[setup]["rounds"].append(await one)
        for setup in setups:
            figures[setup]["counters"] = await settled(place / f"state-{setup}")
    finally:
        for supervisor in supervisors.values():
            await supervisor.__aexit__(None, None, None)
    return figures


def each(prompts: Sequence[Messages]) -> list[tuple[Messages, int]]:
    """The prompts, each with the tokens of its answer."""
    return [(prompt, OUTPUT_TOKENS[number % len(OUTPUT_TOKENS)]) for number, prompt in enumerate(prompts)]


async def answers(url: str, prompts: Sequence[Messages]) -> list[str]:
    """Ask for every prompt once, so that all are stored."""
    async with Client(url, topology.MODEL_NAME, 300) as client:
        return await asyncio.gather(*(client.complete(prompt, tokens) for prompt, tokens in each(prompts)))


async def alone(url: str, prompt: Messages) -> tuple[float, float]:
    """Seconds to the first token of a prompt that is asked for alone, and of its end that is never stored."""
    found = []
    async with Client(url, topology.MODEL_NAME, 120) as client:
        for words in (prompt, (" ".join(prompt[0].split()[-(PROMPT_TOKENS % topology.CHUNK_SIZE) :]),)):
            await emptied(client)
            _, pieces = await client.stream(words, 1)
            found.append(pieces[0])
    return found[0], found[1]


async def play(url: str, prompts: Sequence[Messages], outputs: Sequence[str], setup: str) -> dict[str, float]:
    """One round of one setup: all prompts at once, none of them in the engine's own cache."""
    async with Client(url, topology.MODEL_NAME, 120) as client:
        await emptied(client)
        counted = [STEPS] if setup == NO_OFFLOAD else [STEPS, HITS]
        before = {name: await client.metric(name) for name in counted}
        begun = time.monotonic()
        streams = [client.stream(prompt, tokens) for prompt, tokens in each(prompts)]
        answers = await asyncio.gather(*streams, return_exceptions=True)
        seconds = time.monotonic() - begun
        passed = {name: await client.metric(name) - value for name, value in before.items()}
    good: list[tuple[str, list[float]]] = []
    others = 0
    for answer, expected in zip(answers, outputs, strict=True):
        if isinstance(answer, BaseException):
            if not isinstance(answer, (RequestFailed, TimeoutError, asyncio.TimeoutError, aiohttp.ClientError)):
                raise answer
            continue
        good.append(answer)
        others += answer[0] != expected
    first = [pieces[0] for _, pieces in good]
    between = [later - earlier for _, pieces in good for earlier, later in itertools.pairwise(pieces)]
    return {
        "seconds": seconds,
        "tokens_a_second": sum(len(pieces) for _, pieces in good) / seconds,
        "prompts_a_second": len(good) / seconds,
        "first_token_median": statistics.median(first),
        "first_token_p95": quantile(first, 0.95),
        "between_median": statistics.median(between),
        "between_mean": statistics.mean(between),
        "between_p99": quantile(between, 0.99),
        "steps": passed[STEPS],
        "hit_share": passed.get(HITS, 0)
        / (len(prompts) * (PROMPT_TOKENS // topology.CHUNK_SIZE * topology.CHUNK_SIZE)),
        "failures": len(prompts) - len(good),
        "other_outputs": others,
    }


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


async def settled(state: Path) -> dict[str, int]:
    """The counters when they move no more: a process writes its report within a second of a count."""
    found, before = counters(state), None
    while found != before:
        await asyncio.sleep(2)
        found, before = counters(state), found
    return found


def counters(state: Path) -> dict[str, int]:
    """The patch's counters, added up over a setup's processes."""
    total: Counter[str] = Counter()
    for file in state.glob("*.json"):
        for patch in json.loads(file.read_text(encoding="utf-8"))["patches"]:
            if patch["name"] == PATCH:
                total.update(patch["counters"])
    return dict(total)


COLUMNS = {
    "prompts_a_second": "prompts a second",
    "first_token_median": "first token",
    "first_token_p95": "p95",
    "between_median": "between tokens",
    "between_mean": "mean",
    "between_p99": "p99",
}
"""Of the rounds, each with its ratio to `off`."""


def rows(figures: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A setup a row: medians over the rounds, in brackets over those of `off`."""
    found = []
    for setup, entry in figures.items():
        of = {key: [values[key] for values in entry["rounds"]] for key in entry["rounds"][0]}
        cells = []
        for key in COLUMNS:
            middle = statistics.median(of[key])
            text = f"{middle:.2f}" if key == "prompts_a_second" else duration(middle)
            if "off" in figures and setup != "off":
                text += f" ({ratio(of[key], [values[key] for values in figures['off']['rounds']])})"
            cells.append(text)
        single = [whole for whole, _ in entry["alone"]]
        single_text = duration(statistics.median(single))
        if "off" in figures and setup != "off":
            single_text += f" ({ratio(single, [whole for whole, _ in figures['off']['alone']])})"
        shown = [f"{statistics.median(of['steps']):.0f}", f"{statistics.median(of['hit_share']):.0%}"]
        wrong = [f"{sum(of['failures']):.0f}", f"{sum(of['other_outputs']):.0f}"]
        found.append([TITLES[setup], single_text, *cells, *shown, *wrong])
    return found


def shown(figures: Mapping[str, Mapping[str, Any]], command: str) -> Figures:
    columns = [f"vLLM {VLLM}, LMCache 0.5.6", "one alone, first token", *COLUMNS.values(), "steps", "loaded of stored"]
    return Figures(command, [*columns, "failures", "other answers"], rows(figures))


def measured(options: argparse.Namespace | None = None) -> Figures:
    """All of it, as the pages have it."""
    options = options or arguments().parse_args([])
    python = options.engine_python or environments.engine(VLLM, "0.5.6")
    shape = MODELS[options.model]
    with tempfile.TemporaryDirectory() as temporary:
        work = measure(options.setups, python, options.rounds, options.prompts, options.pool, shape, Path(temporary))
        figures = asyncio.run(work)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    words = ["python -m vllm_livepatch.tools.bench.chunked_load", f"--rounds {options.rounds}"]
    words += [f"--prompts {options.prompts}", f"--pool {options.pool}", f"--model {options.model}"]
    return shown(figures, " ".join(words))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.chunked_load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=32, help="asked for at once")
    parser.add_argument("--pool", type=int, default=4, help="prompts that the engine's KV cache holds")
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--model", choices=MODELS, default="wide")
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    parser.add_argument("--out", type=Path, help="a file for all that was measured, as JSON")
    return parser


def main() -> None:
    measured(arguments().parse_args()).show()


if __name__ == "__main__":
    main()
