"""A decode engine is killed after its prefill was answered; a request comes late: real vLLM 0.29.0 and NIXL, on CPU memory.

Four engines: a stock and a patched prefill engine, a decode engine that is killed and a patched one that lives.

1. The one that lives is busy: what it was promised waits in its queue, its lease renewed, while the dead one's lease
   runs out behind it. On stock that strands the dead one's blocks (vllm#58222).
2. It hears of a request when the lease has ended and other requests have the blocks. Of the stock prefill engine it reads
   their KV, and answers with it (vllm#52234).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.lab import environments, model, topology
from vllm_livepatch.tools.lab.client import Client
from vllm_livepatch.tools.lab.setups import USAGE, drained
from vllm_livepatch.tools.lab.supervisor import Part, Supervisor
from vllm_livepatch.tools.lab.topology import BLOCK_SIZE, MODEL_NAME

from tests.e2e import by_hand

pytestmark = by_hand
VLLM = "0.29.0"
RUNNING = "vllm:num_requests_running"
LEASE_SECONDS = 12
"""Short, for a short test; renewed every 2 s for 8 s, which two busy cores can keep up with."""
PROMPT_TOKENS = 8 * BLOCK_SIZE
BUSY, BUSY_TOKENS = 40, 1500
"""Requests that the living engine works on one by one; more than a fast machine can within the time. What is left of them
is cancelled."""
REUSE_TOKENS = 50 * BLOCK_SIZE
"""In each of REUSES prompts, which together need every block of a prefill engine."""
BLOCKS, REUSES = 200, 5
WRITTEN_SECONDS = 30
"""Within which a process writes what it counted into its report, at the latest."""
HOLDS = 5
"""One for the request that waits, the others for the decode engine that dies."""
SETTLED_SECONDS = LEASE_SECONDS + 5
"""After the kill: by then the dead engine's leases ran out, were seen to have, and it can be read in the metrics."""
WATCHED_SECONDS = SETTLED_SECONDS + LEASE_SECONDS
FIRST_TRIES = 5
"""A first transfer shakes hands with a peer that may still be busy: upstream gives that 5 s, then fails the request."""
PREFILLS = ("stock", "patched")


@dataclass
class Side:
    """What was seen of one prefill engine."""

    held: float = 0.0
    """The share of its blocks that is held just before the decode engine is killed."""
    settled: list[float] = field(default_factory=list)
    """That share from SETTLED_SECONDS on, while the other decode engine's request waits."""
    waiting: bool = False
    """Whether that request waited to the end of this."""
    output: str = ""
    """What that request came to."""
    at_end: float = 1.0
    """That share when all is over."""
    late: str = ""
    """What the request came to that was late."""


@dataclass
class Seen:
    sides: dict[str, Side]
    undisturbed: str
    """The right answer: of a decode engine that was asked alone."""
    undisturbed_late: str
    """And to the request that was late."""
    counters: dict[str, dict[str, int]]
    """By patch, of all processes."""


class Peers:
    """Asks engines over HTTP as a router does, in its two steps."""

    def __init__(self, http: aiohttp.ClientSession, urls: dict[str, str]) -> None:
        self._http, self._urls = http, urls

    async def _complete(self, name: str, prompt: str, tokens: int, transfer: Any) -> dict[str, Any]:
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        if transfer is not None:
            body["kv_transfer_params"] = transfer
        async with self._http.post(f"{self._urls[name]}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            found: dict[str, Any] = await answer.json()
            return found

    async def prefill(self, name: str, prompt: str) -> dict[str, Any]:
        """Have a prompt's KV made and kept; what a decode engine must be told to get it."""
        found = await self._complete(name, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        transfer: dict[str, Any] = found["kv_transfer_params"]
        return transfer

    async def decode(self, name: str, prompt: str, transfer: Any, tokens: int = 16) -> str:
        return str((await self._complete(name, prompt, tokens, transfer))["choices"][0]["text"])

    async def acquaint(self, prefill: str, decode: str, prompt: str) -> str:
        """The first transfer between two; its output."""
        for remaining in reversed(range(FIRST_TRIES)):
            try:
                return await self.decode(decode, prompt, await self.prefill(prefill, prompt))
            except aiohttp.ClientResponseError:
                if not remaining:
                    raise
        raise AssertionError


def deployment(python: Path, work: Path, path: list[Path]) -> topology.Deployment:
    """The prefill engine of the lab's topology four times over, those called `patched` and `alive` with the bundle."""
    described = topology.set_up(topology.load("pd-nixl"), [f"lease={LEASE_SECONDS}"])
    usual = next(role for role in described.roles if role.name == "prefill")
    assert usual.environment is not None
    exact = (
        "--num-gpu-blocks-override",
        str(BLOCKS),
        "--no-enable-prefix-caching",
    )  # each request holds blocks of its own
    roles = tuple(
        replace(
            usual,
            name=name,
            beside=True,
            arguments=(*exact, *(("--max-num-seqs", "1") if name == "alive" else ())),
            environment={key: value.replace("prefill.", f"{name}.") for key, value in usual.environment.items()},
        )
        for name in (*PREFILLS, "alive", "dying")
    )
    injected = {"PYTHONPATH": os.pathsep.join(map(str, path)), **environments.vllm_cache(VLLM)}
    found = topology.local(
        replace(described, roles=roles, ask="stock"), python, model.make(work / "model", seed=1), injected
    )
    with_bundle = ("patched", "alive")
    return replace(
        found, parts=tuple(_patched(part, work) if part.name in with_bundle else part for part in found.parts)
    )


def _patched(part: Part, work: Path) -> Part:
    """The same with the bundle in front of what is on its PYTHONPATH already."""
    path = os.pathsep.join([str(work / "bundle"), part.environment["PYTHONPATH"]])
    injected = {"PYTHONPATH": path, "LIVEPATCH_STATE_DIR": str(work / "state"), "LIVEPATCH": "strict"}
    injected["LIVEPATCH_STATE_KEEP"] = "1"
    return replace(part, environment={**part.environment, **injected})


async def play(work: Path, python: Path, path: list[Path]) -> Seen:
    placing.write_directory(bundle.contents(catalogue.load()), work / "bundle")
    (work / "state").mkdir()
    deployed = deployment(python, work, path)
    urls = {part.name: part.health.removesuffix("/health") for part in deployed.parts}
    prompts = model.prompts(HOLDS + 1, PROMPT_TOKENS, seed=3)
    (late,) = model.prompts(1, PROMPT_TOKENS, seed=4)
    sides = {name: Side() for name in PREFILLS}
    async with (
        Supervisor(work / "parts", print) as parts,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as http,
        Client(urls["stock"], MODEL_NAME) as stock,
        Client(urls["patched"], MODEL_NAME) as patched,
        Client(urls["alive"], MODEL_NAME) as alive,
    ):
        await parts.start(deployed.parts)
        peers, clients = Peers(http, urls), {"stock": stock, "patched": patched}
        undisturbed = await parts.guard(peers.decode("alive", prompts[0], None))
        undisturbed_late = await parts.guard(peers.decode("alive", late, None))
        for name in PREFILLS:
            for decoder in ("alive", "dying"):
                assert await parts.guard(peers.acquaint(name, decoder, prompts[0])) == undisturbed
        for client in clients.values():
            assert await drained(client) == 0
        busy = [asyncio.create_task(peers.decode("alive", prompts[1], None, BUSY_TOKENS)) for _ in range(BUSY)]
        while not await alive.metric(RUNNING):
            assert not any(task.done() for task in busy)
            await asyncio.sleep(0.1)
        promised = {}
        for name in PREFILLS:
            transfer = await peers.prefill(name, prompts[0])
            promised[name] = asyncio.create_task(peers.decode("alive", prompts[0], transfer))
            for prompt in prompts[2:]:  # for the decode engine that dies
                await peers.prefill(name, prompt)
            sides[name].held = await clients[name].metric(USAGE)
        parts.kill("dying")
        begun = time.monotonic()
        while time.monotonic() < begun + WATCHED_SECONDS:
            await asyncio.sleep(1)
            at, found = time.monotonic(), {name: await client.metric(USAGE) for name, client in clients.items()}
            for name, side in sides.items():
                side.settled += [found[name]] if at > begun + SETTLED_SECONDS else []
                side.waiting = not promised[name].done()
        for task in busy:
            task.cancel()
        for name, side in sides.items():
            side.output = await promised[name]
            side.at_end = await parts.guard(drained(clients[name], 3 * LEASE_SECONDS))
        leased = {name: await peers.prefill(name, late) for name in PREFILLS}
        for name, side in sides.items():
            assert await parts.guard(drained(clients[name], 3 * LEASE_SECONDS)) == 0  # the lease has ended
            for prompt in model.prompts(REUSES, REUSE_TOKENS, seed=5):
                await clients[name].complete((prompt,), 1)
            side.late = await parts.guard(peers.decode("alive", late, leased[name]))
        written = time.monotonic() + WRITTEN_SECONDS
        while not (counters := _counters(work / "state"))["failed-loads"] and time.monotonic() < written:
            await asyncio.sleep(0.2)
    return Seen(sides, undisturbed, undisturbed_late, counters)


def _counters(place: Path) -> dict[str, dict[str, int]]:
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in place.glob("**/*.json")]
    found: dict[str, dict[str, int]] = {}
    for report in reports:
        for patch in report["patches"]:
            counted = found.setdefault(patch["name"], {})
            for kind, number in patch["counters"].items():
                counted[kind] = counted.get(kind, 0) + number
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    given = os.environ.get("LIVEPATCH_TEST_PYTHON")
    python = Path(given) if given else environments.engine()
    path = [environments.other_vllm(python, VLLM), environments.nixl(python)]
    found = asyncio.run(play(tmp_path_factory.mktemp("reaper"), python, path))
    print(found)
    return found


def test_the_dead_peers_blocks_come_back_while_the_other_still_waits(seen: Seen) -> None:
    patched = seen.sides["patched"]
    assert patched.waiting, "the other request was to wait all the time"
    assert patched.held > 0
    assert patched.settled == [pytest.approx(patched.held / HOLDS)] * len(patched.settled)
    assert patched.settled


def test_stock_strands_them(seen: Seen) -> None:
    stock = seen.sides["stock"]
    assert stock.waiting
    assert stock.held == seen.sides["patched"].held
    assert set(stock.settled) == {stock.held}


def test_the_other_transfer_completes_with_the_right_output(seen: Seen) -> None:
    assert [side.output for side in seen.sides.values()] == [seen.undisturbed] * 2


def test_nothing_is_held_in_the_end(seen: Seen) -> None:
    assert [side.at_end for side in seen.sides.values()] == [0, 0]


def test_it_was_the_patch(seen: Seen) -> None:
    counters = seen.counters["kv-block-reaper"]
    assert counters["stranded"] >= 1
    assert counters.get("reaped", 0) == 0, "no hold was older than any lease"


def test_after_the_lease_a_stock_prefill_engine_hands_out_another_requests_kv(seen: Seen) -> None:
    assert seen.sides["stock"].late != seen.undisturbed_late
    assert seen.counters["nixl-lease-guard"]["peer_unguarded"] >= 1


def test_after_the_lease_the_answer_is_right_where_both_have_the_bundle(seen: Seen) -> None:
    assert seen.sides["patched"].late == seen.undisturbed_late
    assert seen.counters["nixl-lease-guard"]["lease_lost"] == 1
    assert seen.counters["failed-loads"]["recomputed"] == 1
