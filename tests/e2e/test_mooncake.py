"""Prompts that are too long, then a good one, then two prefill engines that die: real vLLM 0.32.0 and Mooncake's engine.

Three engines of the lab's `pd-mooncake`, over tcp on CPU memory: a stock prefill engine, a patched one, and a patched decode
engine. Both legs of a request are sent at once, as upstream's example proxy sends them.

1. Both engines refuse prompts that are too long. The decode engine tells prefill to let go of each, which prefill never heard of.
   A stock prefill engine waits for each, in all of its tasks, for eight minutes.
2. A good prompt is asked for.
3. A prefill leg never comes; then both prefill engines are killed.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
from vllm_livepatch.sitecustomize.decision import variable
from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.lab import environments, faults, model, topology
from vllm_livepatch.tools.lab.client import Client
from vllm_livepatch.tools.lab.setups import USAGE, drained
from vllm_livepatch.tools.lab.supervisor import Part, Supervisor
from vllm_livepatch.tools.lab.topology import BLOCK_SIZE, MODEL_NAME, Deployment

pytestmark = pytest.mark.skipif(
    "MOONCAKE_STALL" not in os.environ,
    reason="by hand, MOONCAKE_STALL=1: three engines come up, for which CI has not the time",
)
VLLM = "0.32.0"
PREFILLS = ("stock", "patched")
TASKS = 20
"""Of a prefill engine, for asks."""
REFUSED = 400
"""So many prompts that are too long, at most. Those that come to the decode engine within one step become one ask."""
GOOD = 3
BLOCKS, PROMPT_BLOCKS = 200, 8
"""Of the decode engine, and of a prompt."""
TOO_LONG_TOKENS = 2100
ANSWER_TOKENS = 16
ARGUMENTS = ("--num-gpu-blocks-override", str(BLOCKS), "--no-enable-prefix-caching")
"""Of the decode engine: each request loads blocks of its own."""


@dataclass
class Seen:
    undisturbed: list[str]
    """The right answers: of the decode engine alone."""
    first: dict[str, str]
    """The first prompt's answer by way of each prefill engine."""
    refused: set[int]
    """With what HTTP status the prompts that were too long were answered."""
    unanswered: dict[str, int]
    """How many asks to each prefill engine wait for its answer after those."""
    good: list[str]
    """The answers by way of the patched prefill engine, after those."""
    stalled: bool
    """Whether what the stock one was asked for before is still not answered then."""
    dead: dict[str, str]
    """What was answered of those that waited for prefill engines that were killed."""
    at_end: float
    """The share of the decode engine's blocks that is held when all is over."""


class Legs:
    """Asks a prefill and a decode engine at once."""

    def __init__(self, http: aiohttp.ClientSession, deployed: Deployment) -> None:
        self._http = http
        self._urls = {part.name: part.health.removesuffix("/health") for part in deployed.parts}
        ports = {part.name: part.environment.get("VLLM_MOONCAKE_BOOTSTRAP_PORT") for part in deployed.parts}
        self._bootstraps = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        self._engines: dict[str, str] = {}
        self._ports: dict[str, int] = {}  # at which a prefill engine's worker takes asks
        self._transfers = iter(range(10_000))

    async def know(self, prefill: str) -> None:
        async with self._http.get(f"{self._bootstraps[prefill]}/query") as answer:
            answer.raise_for_status()
            known = (await answer.json())["0"]
            self._engines[prefill] = known["engine_id"]
            self._ports[prefill] = urlsplit(known["worker_addr"]["0"]["0"]).port or 0

    async def alone(self, prompt: str) -> str:
        """The decode engine's answer, which computes all of it."""
        return text(await self._post("decode", prompt, ANSWER_TOKENS, None))

    async def both(self, prefill: str, prompt: str) -> tuple[int, Any]:
        """Status and answer of the decode leg."""
        transfer = f"transfer-{next(self._transfers)}"
        sent = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        legs = await asyncio.gather(self._post(prefill, prompt, 1, sent), self._decode(prefill, prompt, transfer))
        return legs[1]

    def unanswered(self, prefill: str) -> int:
        """How many asks wait for an answer: each has a connection of its own, by which nobody else writes."""
        found = psutil.net_connections("tcp")
        return sum(
            one.status == psutil.CONN_ESTABLISHED and getattr(one.raddr, "port", None) == self._ports[prefill]
            for one in found
        )

    async def refuse(self, prefill: str, prompt: str, times: int, enough: int) -> tuple[set[int], int]:
        """Ask for what is refused, one after the other, until so many asks are unanswered.

        With what HTTP status, and how often it was asked for.
        """
        statuses: set[int] = set()
        for number in range(times):
            if self.unanswered(prefill) >= enough:
                return statuses, number
            statuses.add((await self.both(prefill, prompt))[0])
        return statuses, times

    async def decode_only(self, prefill: str, prompt: str) -> tuple[int, Any]:
        """The prefill leg never comes."""
        return await self._decode(prefill, prompt, f"transfer-{next(self._transfers)}")

    async def _decode(self, prefill: str, prompt: str, transfer: str) -> tuple[int, Any]:
        where = {"remote_bootstrap_addr": self._bootstraps[prefill], "remote_engine_id": self._engines[prefill]}
        loaded = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer, **where}
        return await self._post("decode", prompt, ANSWER_TOKENS, loaded)

    async def _post(self, engine: str, prompt: str, tokens: int, transfer: Any) -> tuple[int, Any]:
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        if transfer is not None:
            body["kv_transfer_params"] = transfer
        async with self._http.post(f"{self._urls[engine]}/v1/completions", json=body) as answer:
            return answer.status, await answer.json()


def text(answer: tuple[int, Any]) -> str:
    return str(answer[1]["choices"][0]["text"]) if answer[0] == 200 else f"HTTP {answer[0]}"


def deployment(python: Path, work: Path, mooncake: Path) -> Deployment:
    """The engines of the lab's topology, with two prefill engines."""
    described = topology.load("pd-mooncake")
    usual, decode, _ = described.roles
    assert usual.environment is not None
    assert usual.kv_transfer is not None
    variables = usual.environment
    prefills = (
        replace(
            usual,
            name=name,
            beside=True,
            kv_transfer={**usual.kv_transfer, "engine_id": name},  # decode finds an engine by it
            environment={key: value.replace("prefill.", f"{name}.") for key, value in variables.items()},
        )
        for name in PREFILLS
    )
    injected = {"PYTHONPATH": str(mooncake), **environments.vllm_cache(VLLM)}
    roles = (*prefills, replace(decode, arguments=ARGUMENTS))
    made = model.make(work / "model", seed=1)
    found = topology.local(replace(described, roles=roles, ask="decode"), python, made, injected)
    return replace(found, parts=tuple(_armed(part, work, described.changes) for part in found.parts))


def _armed(part: Part, work: Path, changes: tuple[str, ...]) -> Part:
    """The same with a bundle; of the stock engine, with no more in it than what it needs on CPU memory."""
    place = work / ("bundle-stock" if part.name == "stock" else "bundle")
    path = os.pathsep.join([str(place), part.environment["PYTHONPATH"]])
    injected = {"PYTHONPATH": path, "LIVEPATCH_STATE_DIR": str(work / "state"), "LIVEPATCH": "strict"}
    injected |= {"LIVEPATCH_STATE_KEEP": "1", **{variable(name): "on" for name in changes}}
    return replace(part, environment={**part.environment, **injected})


async def play(work: Path, python: Path, mooncake: Path) -> Seen:
    changes = topology.load("pd-mooncake").changes
    own = {name: entry for name, entry in catalogue.load([faults.PATCHES]).items() if name in changes}
    placing.write_directory(bundle.contents(own), work / "bundle-stock")
    placing.write_directory(bundle.contents({**catalogue.load(), **own}), work / "bundle")
    (work / "state").mkdir()
    deployed = deployment(python, work, mooncake)
    prompts = model.prompts(GOOD, PROMPT_BLOCKS * BLOCK_SIZE, seed=3)
    (too_long,) = model.prompts(1, TOO_LONG_TOKENS, seed=4)
    async with (
        Supervisor(work / "parts", print) as parts,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=1200)
        ) as http,
        Client(deployed.url, MODEL_NAME) as decode,
    ):
        await parts.start(deployed.parts)
        legs = Legs(http, deployed)
        undisturbed = [await parts.guard(legs.alone(prompt)) for prompt in prompts]
        first, refused, times = {}, set(), REFUSED
        for name in PREFILLS:
            await legs.know(name)
            first[name] = text(await parts.guard(legs.both(name, prompts[0])))
            statuses, times = await parts.guard(legs.refuse(name, too_long, times, 2 * TASKS))
            refused |= statuses
        unanswered = {name: legs.unanswered(name) for name in PREFILLS}
        waiting = {"stock": asyncio.create_task(legs.both("stock", prompts[0]))}
        good = [text(await parts.guard(legs.both("patched", prompt))) for prompt in prompts]
        stalled = not waiting["stock"].done()
        waiting["patched"] = asyncio.create_task(legs.decode_only("patched", prompts[1]))
        while await decode.metric(USAGE) < len(waiting) * PROMPT_BLOCKS / BLOCKS:
            assert not any(task.done() for task in waiting.values()), "neither has its KV"
            await asyncio.sleep(0.1)
        for name in PREFILLS:
            parts.kill(name)
        dead = {name: text(await task) for name, task in waiting.items()}
        at_end = await parts.guard(drained(decode))
    return Seen(undisturbed, first, refused, unanswered, good, stalled, dead, at_end)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    python = environments.engine(VLLM)
    mooncake = environments.mooncake(python)
    found = asyncio.run(play(tmp_path_factory.mktemp("mooncake"), python, mooncake))
    print(found)
    return found


def test_kv_goes_from_either_prefill_engine_and_the_answers_are_right(seen: Seen) -> None:
    assert list(seen.first.values()) == [seen.undisturbed[0]] * 2


def test_prompts_that_are_too_long_stall_a_stock_prefill_engine(seen: Seen) -> None:
    assert seen.refused == {400}
    assert seen.unanswered["stock"] > TASKS
    assert seen.stalled


def test_a_patched_one_answers_as_many(seen: Seen) -> None:
    assert seen.unanswered["patched"] < TASKS


def test_a_patched_one_answers_rightly_after_them(seen: Seen) -> None:
    assert seen.good == seen.undisturbed


def test_who_waits_for_a_prefill_engine_that_dies_is_answered_rightly(seen: Seen) -> None:
    """Whether its prefill leg never came, or the engine had stalled. What was held comes back."""
    assert seen.dead == {"stock": seen.undisturbed[0], "patched": seen.undisturbed[1]}
    assert seen.at_end == 0
