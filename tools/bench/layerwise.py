"""Time to first token of prefill/decode over Mooncake, with mooncake-layerwise and without, by prompt and by link.

    python -m vllm_livepatch.tools.bench.layerwise [--links MB...] [--tokens N...] [--at-once N...] [--out FILE]

Real engines (vLLM on CPU, random weights) behind upstream's proxy, which asks both at once: the lab's topology
pd-mooncake-both. Each arm has its own pair of engines; they take turns with the same prompts, and their answers are
compared with those of a prefill engine by itself. A link is the lab's fault `link`: what Mooncake writes takes as long
as at so many MB/s; 0 is this machine's loopback.

- stock, patched: their engines compute `--step` tokens of a prompt at once, without the patch and with it;
- unchunked: as stock, and a prompt is computed in one step. Smaller steps cost something too.

The ideal is max(prefill, transfer) and the transfer of the last step's tokens. Prefill is what the prefill engine takes
by itself, transfer the KV's bytes by the link's rate. `share` is how much of what the ideal would save is saved.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.lab import environments, faults, model, proxy, topology
from vllm_livepatch.tools.lab.client import Client, Said
from vllm_livepatch.tools.lab.supervisor import Supervisor

PATCH = "mooncake-layerwise"
TOPOLOGY = "pd-mooncake-both"
ARMS = ("stock", "patched", "unchunked")
ALONE = "prefill"
"""Beside the arms: the stock arm's prefill engine, asked by itself."""
ANSWER_TOKENS = 8
MEGABYTE = 1_000_000

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
"""Of the model: its KV takes about as long on a link of 100 MB/s as its prefill does on one core."""
TOKEN_BYTES = 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 4
"""KV of a token: keys and values of all layers, float32."""


def deployment(python: Path, made: Path, release: str, step: int, injected: Mapping[str, str]) -> topology.Deployment:
    """The topology's parts, with engines that compute `step` tokens at once and keep no prompt."""
    variables = {**environments.vllm_cache(release), **injected}
    deployed = topology.local(topology.load(TOPOLOGY), python, made, variables)
    parts = []
    for part in deployed.parts:
        words = list(part.command)
        if "--max-model-len" in words:
            words[words.index("--max-model-len") + 1] = str(SHAPE["max_position_embeddings"])
            words += ["--no-enable-prefix-caching", "--max-num-batched-tokens", str(step)]
        parts.append(dataclasses.replace(part, command=tuple(words)))
    return topology.Deployment(tuple(parts), deployed.url)


def variables(arm: str, link: float, place: Path) -> dict[str, str]:
    """What puts an arm's bundle into its engines: the lab's own patches, and of the catalogue the one, or none."""
    entries = catalogue.load([faults.PATCHES])
    wanted = ["mooncake-on-cpu", *(["link"] if link else []), *([PATCH] if arm == "patched" else [])]
    placing.write_directory(bundle.contents({name: entries[name] for name in wanted}), place / f"bundle-{arm}")
    found = {"PYTHONPATH": str(place / f"bundle-{arm}"), "LIVEPATCH_STATE_DIR": str(place / f"state-{arm}")}
    found |= {f"LIVEPATCH_{name.upper().replace('-', '_')}": "on" for name in wanted}
    return {**found, "LIVEPATCH_LINK_MB": f"{link:g}"} if link else found


@dataclasses.dataclass
class Times:
    """Of prompts of one length, so many at once: by arm, and `prefill`, seconds to the first token, in order."""

    seconds: dict[str, list[float]]
    differ: dict[str, int]
    """Answers that are not those of a prefill engine by itself."""


async def measure(options: argparse.Namespace, link: float, python: Path, place: Path) -> list[dict[str, Any]]:
    """A row for each length of prompts and number at once. Raises PartFailed where a server dies."""
    made = model.make(place / "model", seed=1, shape=SHAPE)
    transport = [str(environments.mooncake(python))]
    steps = {arm: SHAPE["max_position_embeddings"] if arm == "unchunked" else options.step for arm in options.arms}
    deployed = {
        arm: deployment(
            python, made, options.vllm, steps[arm], topology.with_path(variables(arm, link, place), transport)
        )
        for arm in options.arms
    }
    async with contextlib.AsyncExitStack() as stack:
        parts, clients = {}, {}
        for arm in options.arms:
            one = Supervisor(place / arm, lambda line: print(line, file=sys.stderr))
            parts[arm] = await stack.enter_async_context(one)
            clients[arm] = await stack.enter_async_context(Client(deployed[arm].url, topology.MODEL_NAME, 300))
            await one.start(deployed[arm].parts)  # one after the other: together they may not get up in time
        first = options.arms[0]
        engine = deployed[first].parts[0].health.removesuffix("/health")
        alone = await stack.enter_async_context(Client(engine, topology.MODEL_NAME, 300))
        rows = []
        for tokens in options.tokens:
            for number in options.at_once:
                times = await asked(parts, {**clients, ALONE: alone}, tokens, number, options.rounds)
                rows.append(row(link, tokens, number, options.step, times))
                print(json.dumps(rows[-1]), file=sys.stderr)
        early = counted(place / "state-patched") if "patched" in options.arms else 0
        return [{**one, "early": early} for one in rows]


async def asked(
    parts: Mapping[str, Supervisor], clients: Mapping[str, Client], tokens: int, number: int, rounds: int
) -> Times:
    """What came of `number` prompts at once, so many times. The first time warms up."""
    arms = list(parts)
    found = Times({name: [] for name in clients}, dict.fromkeys(arms, 0))
    for turn in range(rounds + 1):
        prompts = [(prompt,) for prompt in model.prompts(number, tokens, seed=f"{tokens} {turn}")]
        order = arms[:: -1 if turn % 2 else 1]
        came = {arm: await parts[arm].guard(together(clients[arm], prompts)) for arm in order}
        came[ALONE] = await parts[arms[0]].guard(together(clients[ALONE], prompts))
        right = [text for text, _ in came[ALONE]]
        for arm in arms:
            found.differ[arm] += sum(text != one for (text, _), one in zip(came[arm], right, strict=True))
        if turn:
            for name, answers in came.items():
                found.seconds[name] += [first for _, first in answers]
    return found


async def together(client: Client, prompts: Sequence[Said]) -> list[tuple[str, float]]:
    """The answers to prompts that are asked at once, and the seconds to the first token of each."""
    answers = await asyncio.gather(*(client.stream(prompt, ANSWER_TOKENS) for prompt in prompts))
    return [(text, times[0]) for text, times in answers]


def row(link: float, tokens: int, number: int, step: int, times: Times) -> dict[str, Any]:
    """One line of the result: medians in seconds, and where one prompt is alone the share of the ideal."""
    middle = {name: statistics.median(seconds) for name, seconds in times.seconds.items()}
    found: dict[str, Any] = {"link": link, "tokens": tokens, "at_once": number, "median": middle, **vars(times)}
    if link and number == 1 and {"stock", "patched"} <= set(middle):
        rate = link * MEGABYTE / TOKEN_BYTES
        transfer, last = tokens / rate, ((tokens - 1) % step + 1) / rate
        could = middle[ALONE] + transfer - (max(middle[ALONE], transfer) + last)
        found |= {"transfer": transfer, "last": last}
        found["share"] = (middle["stock"] - middle["patched"]) / could if could > 0 else None
    return found


def counted(state: Path) -> int:
    """Blocks that left early, by the processes' reports."""
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in state.glob("*.json")]
    return sum(
        patch["counters"].get("early", 0) for one in reports for patch in one["patches"] if patch["name"] == PATCH
    )


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    names = list(rows[0]["median"])
    table = Table("link, MB/s", "prompt", "at once", "transfer", *names, "patched/stock", "of the ideal", "differ")
    for one in rows:
        middle, share = one["median"], one.get("share")
        both = {"stock", "patched"} <= set(middle)
        table.add_row(
            f"{one['link']:g}" if one["link"] else "loopback",
            str(one["tokens"]),
            str(one["at_once"]),
            f"{one['transfer'] * 1000:.0f} ms" if "transfer" in one else "",
            *(f"{middle[name] * 1000:.0f} ms" for name in names),
            f"{middle['patched'] / middle['stock']:.2f}" if both else "",
            "" if share is None else f"{share:.0%}",
            str(sum(one["differ"].values())),
        )
    Console(soft_wrap=True).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.layerwise", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", default="0.32.0")
    parser.add_argument("--lmcache", default="0.5.6", help="of the engine's environment; it is not used")
    parser.add_argument("--links", nargs="+", type=float, default=[100, 400, 0], help="MB/s; 0 is the loopback")
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 1024, 3072], help="lengths of prompts")
    parser.add_argument("--at-once", nargs="+", type=int, default=[1], help="how many prompts are asked at once")
    parser.add_argument("--rounds", type=int, default=9, help="how often; a first one warms up")
    parser.add_argument("--step", type=int, default=256, help="tokens that an engine computes at once")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args()
    python = environments.engine(options.vllm, options.lmcache)
    proxy.fetch()
    rows: list[dict[str, Any]] = []
    for link in options.links:
        with tempfile.TemporaryDirectory() as temporary:
            rows += asyncio.run(measure(options, link, python, Path(temporary)))
    show(rows)
    if options.out:
        found = {"vllm": options.vllm, "step": options.step, "token_bytes": TOKEN_BYTES, "model": SHAPE, "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
