"""Time to first token of prefill/decode over Mooncake, with mooncake-layerwise and without, by prompt and by link.

    python -m vllm_livepatch.tools.bench.layerwise [--links MB...] [--tokens N...] [--rounds N] [--step N] [--out FILE]

Real engines (vLLM on CPU, random weights) behind upstream's proxy, which asks both at once: the lab's topology
pd-mooncake-both. Each arm has its own pair of engines; they take turns with the same prompts, one request at a time.
A link is the lab's fault `link`: what Mooncake writes takes as long as at so many MB/s; 0 is this machine's loopback.

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
from vllm_livepatch.tools import bundle, catalogue, environments, placing
from vllm_livepatch.tools.lab import faults, model, proxy, topology
from vllm_livepatch.tools.lab.client import Client
from vllm_livepatch.tools.lab.supervisor import Supervisor, together

VLLM = "0.32.0"
PATCH = "mooncake-layerwise"
TOPOLOGY = "pd-mooncake-both"
ARMS = ("stock", "patched")
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


def make_model(directory: Path) -> Path:
    """The lab's tokenizer, and a larger model, whose weights the engine draws itself."""
    tiny = model.make(directory)
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    (tiny / "config.json").write_text(json.dumps({**config, **SHAPE}), encoding="utf-8")
    return tiny


def deployment(python: Path, tiny: Path, step: int, variables: Mapping[str, str]) -> topology.Deployment:
    """The topology's parts, with engines that compute `step` tokens at once and keep no prompt."""
    # Engines share the machine: threads bound to cores would spin where another engine computes.
    deployed = topology.local(topology.load(TOPOLOGY), python, tiny, {**environments.vllm_cache(VLLM), **variables})
    parts = []
    for part in deployed.parts:
        words = list(part.command)
        if "--max-model-len" in words:
            words[words.index("--max-model-len") + 1] = str(SHAPE["max_position_embeddings"])
            words += ["--load-format", "dummy", "--no-enable-prefix-caching", "--max-num-batched-tokens", str(step)]
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


async def measure(
    link: float, tokens: Sequence[int], rounds: int, step: int, python: Path, place: Path
) -> list[dict[str, Any]]:
    """A row for each prompt's length. Raises PartFailed where a server dies."""
    tiny = make_model(place / "model")
    transport = [str(environments.mooncake(python))]
    deployed = {
        arm: deployment(python, tiny, step, topology.with_path(variables(arm, link, place), transport)) for arm in ARMS
    }
    async with contextlib.AsyncExitStack() as stack:
        parts = {
            arm: await stack.enter_async_context(Supervisor(place / arm, lambda line: print(line, file=sys.stderr)))
            for arm in ARMS
        }
        await together(*(parts[arm].start(deployed[arm].parts) for arm in ARMS))
        ask = {
            arm: await stack.enter_async_context(Client(deployed[arm].url, topology.MODEL_NAME, 300)) for arm in ARMS
        }
        engine = deployed["stock"].parts[0].health.removesuffix("/health")
        alone = await stack.enter_async_context(Client(engine, topology.MODEL_NAME, 300))
        return [row(link, length, step, await asked(parts, ask, alone, length, rounds)) for length in tokens]


async def asked(
    parts: Mapping[str, Supervisor], ask: Mapping[str, Client], alone: Client, length: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds to the first token, by arm and of the prefill engine by itself. The first prompt warms up."""
    seconds: dict[str, list[float]] = {"stock": [], "patched": [], "prefill": []}
    for number, prompt in enumerate(model.prompts(rounds + 1, length, seed=length)):
        for arm in ARMS[:: -1 if number % 2 else 1]:
            _, times = await parts[arm].guard(ask[arm].stream((prompt,), 2))
            seconds[arm].append(times[0])
        _, times = await parts["stock"].guard(alone.stream((prompt,), 1))
        seconds["prefill"].append(times[0])
    return {arm: times[1:] for arm, times in seconds.items()}


def row(link: float, length: int, step: int, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """One line of the result: medians in seconds, their ratio, and the share of the ideal."""
    stock, patched, prefill = (statistics.median(seconds[key]) for key in ("stock", "patched", "prefill"))
    found: dict[str, Any] = {"link": link, "tokens": length, "stock": stock, "patched": patched, "prefill": prefill}
    found |= {"ratio": patched / stock, "rounds": {key: list(values) for key, values in seconds.items()}}
    if link:
        rate = link * MEGABYTE / TOKEN_BYTES
        transfer, last = length / rate, ((length - 1) % step + 1) / rate
        could = prefill + transfer - (max(prefill, transfer) + last)
        found |= {"transfer": transfer, "last": last, "share": (stock - patched) / could if could > 0 else None}
    return found


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table("link, MB/s", "prompt", "prefill", "transfer", "stock", "patched", "patched/stock", "of the ideal")
    for one in rows:
        share = one.get("share")
        table.add_row(
            f"{one['link']:g}" if one["link"] else "loopback",
            str(one["tokens"]),
            *(f"{one[key] * 1000:.0f} ms" if key in one else "" for key in ("prefill", "transfer", "stock", "patched")),
            f"{one['ratio']:.2f}",
            "" if share is None else f"{share:.0%}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.layerwise", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--links", nargs="+", type=float, default=[100, 400, 0], help="MB/s; 0 is the loopback")
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 1024, 3072], help="lengths of prompts")
    parser.add_argument("--rounds", type=int, default=9, help="prompts of each length")
    parser.add_argument("--step", type=int, default=256, help="tokens that an engine computes at once")
    parser.add_argument("--engine-python", type=Path, help="default: the engine's cached environment")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args()
    python = options.engine_python or environments.engine(VLLM, "0.5.6")
    proxy.fetch()
    rows: list[dict[str, Any]] = []
    for link in options.links:
        with tempfile.TemporaryDirectory() as temporary:
            work = measure(link, options.tokens, options.rounds, options.step, python, Path(temporary))
            rows += asyncio.run(work)
    show(rows)
    if options.out:
        found = {"vllm": VLLM, "step": options.step, "token_bytes": TOKEN_BYTES, "model": SHAPE, "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
