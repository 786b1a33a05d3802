"""A client hangs up while its KV is read, and the prefill engine stands still meanwhile: who gets the blocks?

Engines, each with NIXL and an LMCache server in a MultiConnector: stock, with the bundle as it is, and by hand with that of
version 0.1.0. Each is in its turn the decode engine of one scene, with another for its prefill engine:

1. The prefill engine has a prompt's KV ready, and is stopped. The decode engine begins to read; nobody sends.
2. The client hangs up. LMCache's part of the connector says in the next step that it is done.
3. Another client asks for more blocks than are left beside those of the first. Where it gets them, its answer begins;
   where it does not, it waits.
4. The prefill engine goes on, and what was asked for arrives.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest
from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.lab import environments, logs, model, revisions, topology
from vllm_livepatch.tools.lab.client import Client, RequestFailed
from vllm_livepatch.tools.lab.setups import USAGE, drained
from vllm_livepatch.tools.lab.supervisor import Part, Supervisor
from vllm_livepatch.tools.lab.topology import BLOCK_SIZE, MODEL_NAME

from tests.e2e import BY_HAND, by_hand
from tests.e2e.test_killed_decode import Peers

VLLM, LMCACHE = "0.32.0", "0.5.6"
VERSION_0_1_0 = "26663bb"
WAITING, GENERATED = "vllm:num_requests_waiting", "vllm:generation_tokens_total"
BLOCKS = 70
"""Of each engine, one of which vLLM keeps for itself: enough for one request of the greatest length."""
FIRST_BLOCKS, SECOND_BLOCKS = 40, 45
ANSWER_TOKENS = 400
BEGUN_TOKENS = 20
"""Of the second client's answer, when the prefill engine goes on."""
NUDGE = ("w1 w2 w3 w4",)
TRIES = 5
"""Of a scene in which the blocks are given away: on a busy machine the answer may be complete before the KV arrives."""
SCENES = {"now": "stock", **({"earlier": "now"} if BY_HAND else {}), "stock": "now"}
"""Decode engines, and the prefill engine of each. The one that dies comes last."""


@dataclass
class Scene:
    """What was seen of one decode engine."""

    held: bool
    """Whether the first client's blocks were still held while its KV had yet to arrive."""
    answer: str | None
    """The second client's; None: it got none."""
    at_end: float | None
    """The share of blocks that is held when all is over; None where the engine did not live to tell."""


@dataclass
class Seen:
    scenes: dict[str, Scene]
    undisturbed: str
    """The second client's answer, of an engine that did nothing else."""
    assertion: list[str]
    """What the stock engine died of."""


def deployment(python: Path, work: Path, path: list[Path]) -> topology.Deployment:
    """The LMCache server of the lab's topology, and its decode engine for each scene."""
    described = topology.set_up(topology.load("pd-nixl-multi"), [f"blocks={BLOCKS}"])
    server, usual = (role for role in described.roles if role.name in ("lmcache", "decode"))
    assert usual.environment is not None
    variables = usual.environment
    engines = tuple(
        replace(
            usual,
            name=name,
            arguments=(*usual.arguments, "--no-enable-prefix-caching"),  # each request has blocks of its own
            environment={key: value.replace("decode.", f"{name}.") for key, value in variables.items()},
        )
        for name in SCENES
    )
    injected = {"PYTHONPATH": os.pathsep.join(map(str, path)), **environments.vllm_cache(VLLM)}
    made = model.make(work / "model", seed=1)
    found = topology.local(replace(described, roles=(server, *engines), ask="stock"), python, made, injected)
    return replace(found, parts=tuple(_patched(part, work) for part in found.parts))


def _patched(part: Part, work: Path) -> Part:
    """The same with its bundle, if it has one, in front of what is on its PYTHONPATH already."""
    place = work / f"bundle-{part.name}"
    if not place.is_dir():
        return part
    path = os.pathsep.join([str(place), part.environment["PYTHONPATH"]])
    state = work / f"state-{part.name}"
    state.mkdir()
    injected = {"PYTHONPATH": path, "LIVEPATCH_STATE_DIR": str(state), "LIVEPATCH": "strict"}
    return replace(part, environment={**part.environment, **injected})


async def until(condition: Callable[[], Awaitable[bool]], asking: asyncio.Task[str]) -> None:
    """Wait for it; or for the end of the request that it depends on, which is then early."""
    while not await condition():
        assert not asking.done(), "answered, or failed, before what it was to meet"
        await asyncio.sleep(0.05)


async def play_scene(parts: Supervisor, peers: Peers, client: Client, decode: str, prompts: list[str]) -> Scene:
    first, second = prompts
    prefill = SCENES[decode]
    transfer = await peers.prefill(prefill, first)
    generated = await client.metric(GENERATED)

    async def has_blocks() -> bool:
        return await client.metric(USAGE) >= FIRST_BLOCKS / BLOCKS

    async def waits() -> bool:
        return await client.metric(WAITING) == 1

    async def begun() -> bool:
        return await client.metric(GENERATED) >= generated + BEGUN_TOKENS

    parts.pause(prefill)
    asking = asyncio.create_task(peers.decode(decode, first, transfer))
    await until(has_blocks, asking)
    asking.cancel()  # the client hangs up
    while await waits():
        await client.complete(NUDGE, 1)
    await client.complete(NUDGE, 8)  # the engine has stepped on, and was told what its connectors had to tell
    held = await has_blocks()
    generated = await client.metric(GENERATED)
    asking = asyncio.create_task(client.complete((second,), ANSWER_TOKENS))
    await until(waits if held else begun, asking)
    parts.resume(prefill)
    try:
        return Scene(held, await asking, await drained(client))
    except (RequestFailed, aiohttp.ClientError):
        return Scene(held, None, None)


async def play(work: Path, python: Path, path: list[Path]) -> Seen:
    placing.write_directory(bundle.contents(catalogue.load()), work / "bundle-now")
    if "earlier" in SCENES:
        earlier = revisions.checkout(VERSION_0_1_0)
        revisions.command_line("generate", "--out", str(work / "bundle-earlier"), path=earlier)
    deployed = deployment(python, work, path)
    urls = {part.name: part.health.removesuffix("/health") for part in deployed.parts}
    (known,) = model.prompts(1, 2 * BLOCK_SIZE, seed=4)
    prompts = [
        *model.prompts(1, FIRST_BLOCKS * BLOCK_SIZE, seed=5),
        *model.prompts(1, SECOND_BLOCKS * BLOCK_SIZE, seed=6),
    ]
    scenes = {}
    async with (
        Supervisor(work / "parts", print) as parts,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http,
    ):
        await parts.start(deployed.parts)
        peers = Peers(http, urls)
        async with Client(urls["stock"], MODEL_NAME) as client:
            undisturbed = await parts.guard(client.complete((prompts[1],), ANSWER_TOKENS))
        for decode, prefill in SCENES.items():
            async with Client(urls[decode], MODEL_NAME, timeout=120) as client:
                await parts.guard(peers.acquaint(prefill, decode, known))
                for _ in range(TRIES):
                    scenes[decode] = await play_scene(parts, peers, client, decode, prompts)
                    if scenes[decode].held or scenes[decode].answer != undisturbed:
                        break
    return Seen(scenes, undisturbed, logs.assertion(work / "parts", ["stock"]))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    python = environments.engine(VLLM, LMCACHE)
    found = asyncio.run(play(tmp_path_factory.mktemp("alive"), python, [environments.nixl(python)]))
    for name, scene in found.scenes.items():
        print(f"{name}: held {scene.held}, right {scene.answer == found.undisturbed}, at the end {scene.at_end}")
    return found


def test_stock_gives_the_blocks_away_and_dies_when_their_kv_arrives(seen: Seen) -> None:
    stock = seen.scenes["stock"]
    assert not stock.held
    assert stock.answer is None
    assert any("_update_from_kv_xfer_finished" in line for line in seen.assertion)
    assert seen.assertion[-1] == "AssertionError"


@by_hand
def test_version_0_1_0_gives_them_away_and_lives_on_with_a_wrong_answer(seen: Seen) -> None:
    """CI finds it wrong by drawn worlds (tests/simulation)."""
    earlier = seen.scenes["earlier"]
    assert not earlier.held
    assert earlier.answer is not None
    assert earlier.answer != seen.undisturbed


def test_now_they_are_held_until_their_kv_has_arrived_and_the_answer_is_right(seen: Seen) -> None:
    now = seen.scenes["now"]
    assert now.held
    assert now.answer == seen.undisturbed


def test_now_they_come_back(seen: Seen) -> None:
    assert seen.scenes["now"].at_end == 0
