"""Time to first token of prefill/decode over Mooncake, with mooncake-layerwise and without, by prompt and by link.

    python -m vllm_livepatch.tools.bench.layerwise [--links MB...] [--tokens N...] [--at-once N...] [--out FILE]
    python -m vllm_livepatch.tools.bench.layerwise --kept tests/results/layerwise.json --write docs/layerwise.md

Real engines (vLLM on CPU, random weights) behind upstream's proxy, which asks both at once: the lab's topology
pd-mooncake-both. Each setup has its own pair of engines; they take turns with the same prompts, and their answers are
compared with those of a prefill engine by itself. A link is the lab's fault `link`: what Mooncake writes takes as long
as at so many MB/s; 0 is this machine's loopback.

- stock: without the patch; an engine computes up to `--whole` tokens at once;
- again: stock once more, for how far two equal setups differ; not among those measured by default;
- layer: the same, with the patch by layer;
- chunk: with the patch by chunk; an engine computes `--step` tokens at once, since whole blocks leave after steps only;
- before: by layer, with the bundle as the revision `--before` of this checkout makes it.

One machine is to stand for two with a device each. So in each setup the thread that computes prefills has a core of its
own, and an engine that waits for KV makes fewer empty steps (the lab's `empty-steps`), which took the transfer's time.

The ideal is max(prefill, transfer) and the transfer of the last layer. Prefill is what the stock setup's prefill engine
takes by itself, transfer the KV's bytes by the link's rate. `share` is how much of what the ideal would save is saved.
`--window` has three of four layers attend to so many tokens, a group of their own that leaves when a prefill has ended.
`--out` is written after each row: what is cut off keeps those that are there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.commands import matrix
from vllm_livepatch.tools.lab import environments, faults, model, proxy, revisions, topology
from vllm_livepatch.tools.lab.client import Client, Messages
from vllm_livepatch.tools.lab.supervisor import Supervisor
from vllm_livepatch.tools.measured import measured_on

PATCH = "mooncake-layerwise"
TOPOLOGY = "pd-mooncake-both"
STOCK = "stock"
AGAIN = "again"
BEFORE = "before"
PATCHED = ("layer", "chunk", BEFORE)
"""Setups, the first two each by its option BY."""
SETUPS = (STOCK, AGAIN, *PATCHED)
ALONE = "prefill"
"""Beside the setups: the stock setup's prefill engine, asked by itself."""
ANSWER_TOKENS = 2
MEGABYTE = 1_000_000
LINK = "link"
"""The file that says the link's rate to the engines."""

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "max_position_embeddings": 10240,
}
"""Of the model: narrow, with much KV a token (96 KiB; a model of 8 billion parameters has 128). So the KV of 1,024
tokens takes about as long on a link of 400 MB/s as their prefill does on one core."""
LAYER_NUMBERS = 2 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
"""Of a token's KV: keys and values of one layer."""
TOKEN_NUMBERS = LAYER_NUMBERS * SHAPE["num_hidden_layers"]
"""The same, of all layers."""
FULL = 4
"""With `--window`, each so-manyth layer attends to all tokens."""
BYTES = {"bfloat16": 2, "float32": 4}
"""Of a number. A processor without instructions for bfloat16 computes it much slower than float32."""
ENGINE = {"--block-size": "32", "--max-model-len": str(SHAPE["max_position_embeddings"])}
KV_GIB = 1
"""Of each engine, which writes to all of it when it starts: enough for 10,922 tokens of bfloat16."""


def shape(window: int | None) -> dict[str, Any]:
    """Of the model, whose layers but each `FULL`th attend to `window` tokens; None: all attend to all."""
    if window is None:
        return SHAPE
    kinds = [
        "sliding_attention" if (layer + 1) % FULL else "full_attention" for layer in range(SHAPE["num_hidden_layers"])
    ]
    return {**SHAPE, "layer_types": kinds, "sliding_window": window}


def prompt_numbers(tokens: int, window: int | None) -> int:
    """Of the KV of a prompt, as much of it as decode needs."""
    full = SHAPE["num_hidden_layers"] // FULL if window is not None else SHAPE["num_hidden_layers"]
    rest = (SHAPE["num_hidden_layers"] - full) * min(tokens, window or tokens)
    return LAYER_NUMBERS * (full * tokens + rest)


def deployment(
    python: Path, made: Path, release: str, step: int, injected: Mapping[str, str], dtype: str = "bfloat16"
) -> topology.Deployment:
    """The topology's parts, with engines that compute `step` tokens at once and keep no prompt."""
    room = str(KV_GIB * BYTES[dtype] // BYTES["bfloat16"])
    variables = {**environments.vllm_cache(release), "VLLM_CPU_KVCACHE_SPACE": room, **injected}
    deployed = topology.local(topology.load(TOPOLOGY), python, made, variables)
    parts = []
    for part in deployed.parts:
        words = list(part.command)
        if "--max-model-len" in words:
            for option, value in {**ENGINE, "--dtype": dtype}.items():
                words[words.index(option) + 1] = value
            words += ["--no-enable-prefix-caching", "--max-num-batched-tokens", str(step)]
        parts.append(dataclasses.replace(part, command=tuple(words)))
    return topology.Deployment(tuple(parts), deployed.url)


def variables(setup: str, place: Path, before: str = "HEAD") -> dict[str, str]:
    """What puts a setup's bundle into its engines: the lab's own patches, and of the catalogue the one, or none."""
    wanted = ["mooncake-on-cpu", "link", "empty-steps", *([PATCH] if setup in PATCHED else [])]
    directory = place / f"bundle-{setup}"
    if setup == BEFORE:
        then = revisions.checkout(before)
        own = then / "vllm_livepatch" / faults.PATCHES.relative_to(revisions.ROOT)
        chosen = [word for name in wanted for word in ("--patch", name)]
        revisions.command_line("generate", "--out", str(directory), *chosen, "--patch-dir", str(own), path=then)
    else:
        entries = catalogue.load([faults.PATCHES])
        placing.write_directory(bundle.contents({name: entries[name] for name in wanted}), directory)
    found = {"PYTHONPATH": str(directory), "LIVEPATCH_STATE_DIR": str(place / f"state-{setup}")}
    found |= {f"LIVEPATCH_{name.upper().replace('-', '_')}": "on" for name in wanted}
    found["LIVEPATCH_LINK_FILE"] = str(place / LINK)
    return (
        {**found, "LIVEPATCH_MOONCAKE_LAYERWISE_BY": "layer" if setup == BEFORE else setup}
        if setup in PATCHED
        else found
    )


@dataclasses.dataclass
class Times:
    """Of prompts of one length, so many at once: by setup, and `prefill`, seconds to the first token, in order."""

    seconds: dict[str, list[float]]
    differ: dict[str, int]
    """Answers that are not those of a prefill engine by itself."""


async def measure(options: argparse.Namespace, python: Path, place: Path, kept: Callable[[Any], None]) -> None:
    """A row for each link, length of prompts and number at once. Raises PartFailed where a server dies."""
    made = model.make(place / "model", seed=1, shape=shape(options.window))
    transport = [str(environments.mooncake(python))]
    steps = {setup: options.step if setup == "chunk" else options.whole for setup in options.setups}
    deployed = {}
    for setup in options.setups:
        injected = topology.with_path(variables(setup, place, options.before), transport)
        deployed[setup] = deployment(python, made, options.vllm, steps[setup], injected, options.dtype)
    (place / LINK).write_text("0", encoding="utf-8")
    async with contextlib.AsyncExitStack() as stack:
        parts, clients = {}, {}
        for setup in options.setups:
            one = Supervisor(place / setup, lambda line: print(line, file=sys.stderr))
            parts[setup] = await stack.enter_async_context(one)
            clients[setup] = await stack.enter_async_context(Client(deployed[setup].url, topology.MODEL_NAME, 300))
            await one.start(deployed[setup].parts)  # one after the other: together they may not get up in time
        first = options.setups[0]
        engine = deployed[first].parts[0].health.removesuffix("/health")
        clients[ALONE] = await stack.enter_async_context(Client(engine, topology.MODEL_NAME, 300))
        for tokens in options.tokens:
            warm = await alone(clients, tokens, 1, 1)
            await asked(parts, clients, tokens, 1, warm)
            keep_apart(parts.values())  # now that those threads are there which are made when they are needed
            for number in options.at_once:
                if tokens * number > options.most:
                    continue
                (place / LINK).write_text("0", encoding="utf-8")
                rounds = max(3, min(options.rounds, options.most // (tokens * number)))
                by_itself = await alone(clients, tokens, number, rounds)
                for link in options.links:
                    (place / LINK).write_text(f"{link:g}", encoding="utf-8")
                    times = await asked(parts, clients, tokens, number, by_itself)
                    found = row(link, tokens, number, times, BYTES[options.dtype], options.window)
                    kept({**found, "early": counted(place)})


def keep_apart(supervisors: Iterable[Supervisor]) -> None:
    """The thread that computes prefills has a core of its own, as a device would be; all else shares the others."""
    own, *others = sorted(os.sched_getaffinity(0))
    for process in itertools.chain.from_iterable(one.processes() for one in supervisors):
        computes = process["part"] == "prefill" and process["name"].startswith("VLLM::Worker")
        for thread in map(int, os.listdir(f"/proc/{process['pid']}/task")):
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(thread, [own] if computes and thread == process["pid"] else others or [own])


Answers = list[tuple[str, float]]
"""Of prompts that were asked at once: the text, and the seconds to the first token, of each."""


async def alone(clients: Mapping[str, Client], tokens: int, number: int, rounds: int) -> list[Answers]:
    """What a prefill engine by itself answers, in each round."""
    return [await together(clients[ALONE], prompts(tokens, number, turn)) for turn in range(rounds)]


def prompts(tokens: int, number: int, turn: int) -> list[Messages]:
    return [(prompt,) for prompt in model.prompts(number, tokens, seed=f"{tokens} {turn}")]


async def asked(
    parts: Mapping[str, Supervisor],
    clients: Mapping[str, Client],
    tokens: int,
    number: int,
    by_itself: Sequence[Answers],
) -> Times:
    """What came of `number` prompts at once, in as many rounds as a prefill engine has answered by itself."""
    setups = list(parts)
    found = Times({name: [] for name in (*setups, ALONE)}, dict.fromkeys(setups, 0))
    for turn, right in enumerate(by_itself):
        # Each comes after each of the others about as often.
        order = [setups[(turn + place) % len(setups)] for place in range(len(setups))][
            :: -1 if turn // len(setups) % 2 else 1
        ]
        came = {
            setup: await parts[setup].guard(together(clients[setup], prompts(tokens, number, turn))) for setup in order
        }
        for setup in setups:
            found.differ[setup] += sum(text != one for (text, _), (one, _) in zip(came[setup], right, strict=True))
        for name, answers in {**came, ALONE: right}.items():
            found.seconds[name] += [round(first, 4) for _, first in answers]
    return found


async def together(client: Client, prompts: Sequence[Messages]) -> Answers:
    """What comes of prompts that are asked at once."""
    answers = await asyncio.gather(*(client.stream(prompt, ANSWER_TOKENS) for prompt in prompts))
    return [(text, times[0]) for text, times in answers]


def row(
    link: float, tokens: int, number: int, times: Times, size: int = BYTES["bfloat16"], window: int | None = None
) -> dict[str, Any]:
    """One line of the result: medians in seconds, and on a link where one prompt is alone the share of the ideal."""
    middle = {name: round(statistics.median(seconds), 4) for name, seconds in times.seconds.items()}
    found: dict[str, Any] = {"link": link, "tokens": tokens, "at_once": number, "median": middle, **vars(times)}
    if link and number == 1 and STOCK in middle:
        transfer = prompt_numbers(tokens, window) * size / (link * MEGABYTE)
        last = tokens * LAYER_NUMBERS * size / (link * MEGABYTE)
        could = middle[ALONE] + transfer - (max(middle[ALONE], transfer) + last)
        found |= {"transfer": round(transfer, 4)}
        found["share"] = {name: round((middle[STOCK] - middle[name]) / could, 2) for name in PATCHED if name in middle}
    return found


def counted(place: Path) -> dict[str, int]:
    """Blocks that left early so far, by the reports of each setup's processes."""
    found = {}
    for setup in PATCHED:
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in (place / f"state-{setup}").glob("*.json")]
        patches = [patch for one in reports for patch in one["patches"] if patch["name"] == PATCH]
        found[setup] = sum(patch["counters"].get("early", 0) for patch in patches)
    return found


def rows(figures: Mapping[str, Any]) -> list[list[str]]:
    """Columns, and a line for each row: milliseconds, and beside the patched setups the part of stock's time."""
    names = [name for name in (*SETUPS, ALONE) if name in figures["rows"][0]["median"]]
    lines = [["link, MB/s", "prompt", "at once", "transfer", *names, "of the ideal", "other answers"]]
    for one in figures["rows"]:
        middle, share = one["median"], one.get("share", {})
        times = {name: f"{middle[name] * 1000:.0f} ms" for name in names}
        for name in (AGAIN, *PATCHED):
            if name in times and STOCK in times:
                times[name] += f" ({middle[name] / middle[STOCK]:.2f})"
        lines.append(
            [
                f"{one['link']:g}" if one["link"] else "loopback",
                f"{one['tokens']:,}",
                str(one["at_once"]),
                f"{one['transfer'] * 1000:.0f} ms" if "transfer" in one else "",
                *times.values(),
                ", ".join(f"{name} {part:.0%}" for name, part in share.items()),
                str(sum(one["differ"].values())),
            ]
        )
    return lines


def markdown(figures: Mapping[str, Any]) -> str:
    """The rows for a document."""
    columns, *lines = rows(figures)
    table = "".join(f"| {' | '.join(line)} |\n" for line in (columns, ["---"] * len(columns), *lines))
    if "date" not in figures:
        return table
    source = f"vLLM {figures['vllm']}, {figures['date']}, revision {figures['revision']}, {figures['machine']}."
    return f"{table}\n{source}\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.layerwise", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", default="0.32.0")
    parser.add_argument("--lmcache", default="0.5.6", help="of the engine's environment; it is not used")
    parser.add_argument("--links", nargs="+", type=float, default=[100, 400, 0], help="MB/s; 0 is the loopback")
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 1024, 3072, 8192], help="lengths of prompts")
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 4, 16], help="how many prompts are asked at once")
    parser.add_argument("--most", type=int, default=8192, help="tokens that are asked at once; more is left out")
    parser.add_argument(
        "--rounds", type=int, default=7, help="how often at most; fewer where prompts are long, 3 at least"
    )
    parser.add_argument("--whole", type=int, default=2048, help="tokens that an engine computes at once")
    parser.add_argument("--step", type=int, default=256, help="the same, of the setup by chunk")
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=[STOCK, "layer", "chunk"])
    parser.add_argument("--before", help="the revision of this checkout whose bundle the setup `before` has")
    parser.add_argument("--window", type=int, help="tokens that three of four layers attend to; default: all")
    parser.add_argument("--dtype", choices=list(BYTES), default="bfloat16", help="of the model and its KV")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON, written after each row")
    parser.add_argument("--kept", type=Path, help="the JSON of an earlier run: nothing is run")
    parser.add_argument("--write", type=Path, help="a document, for its <!-- layerwise --> table")
    parser.add_argument("--table", default="layerwise", help="the table's name in that document")
    options = parser.parse_args()
    if (BEFORE in options.setups) != (options.before is not None):
        parser.error("--setups before and --before REVISION go together")
    if options.kept:
        figures = json.loads(options.kept.read_text(encoding="utf-8"))
    else:
        figures = {"vllm": options.vllm, "whole": options.whole, "step": options.step, "dtype": options.dtype}
        figures["token_bytes"] = TOKEN_NUMBERS * BYTES[options.dtype]
        figures |= {"model": shape(options.window), "command": " ".join(["bench.layerwise", *sys.argv[1:]])}
        figures |= measured_on(Path(__file__).resolve().parents[2]) | {"rows": []}

        def kept(found: dict[str, Any]) -> None:
            del found["seconds"]
            figures["rows"].append(found)
            print(json.dumps(found), file=sys.stderr, flush=True)
            if options.out:
                options.out.write_text(json.dumps(figures) + "\n", encoding="utf-8")

        python = environments.engine(options.vllm, options.lmcache)
        proxy.fetch()
        with tempfile.TemporaryDirectory() as temporary:
            asyncio.run(measure(options, python, Path(temporary), kept))
    if options.write:
        matrix.write(options.write, markdown(figures), options.table)
    columns, *lines = rows(figures)
    table = Table(*columns)
    for line in lines:
        table.add_row(*line)
    Console(soft_wrap=True).print(table)


if __name__ == "__main__":
    main()
