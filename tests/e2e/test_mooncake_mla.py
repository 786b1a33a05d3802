"""A model with MLA whose latent vectors leave by layer: real vLLM 0.32.0, Mooncake's engine, upstream's proxy.

Two pairs of engines, stock and by layer, over a slow link. Prefill computes a prompt's tokens together, and the decode
engine computes the last one anew, by MLA's other way of computing: on CPU the two differ by more than rounding, so an
engine that does both itself is no measure for the pair. Its *second* token is: a prompt with the first one behind it
has the decode engine compute the same, on latent vectors that prefill computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm_livepatch.tools.bench import layerwise
from vllm_livepatch.tools.lab import environments, model, proxy, topology
from vllm_livepatch.tools.lab.client import Client
from vllm_livepatch.tools.lab.supervisor import Part, Supervisor

from tests.e2e import mla_model

pytestmark = pytest.mark.skipif(
    "MOONCAKE_MLA" not in os.environ,
    reason="by hand, MOONCAKE_MLA=1: four engines come up, for which CI has not the time",
)
VLLM = "0.32.0"
SETUPS = (layerwise.STOCK, "layer")
LINKS = ("0", "20")
"""MB/s; 0 is the loopback."""
TOKENS = (300, 1024)
"""Of prompts: the last block of the first is not full."""
TURNS = 3
ANSWER_TOKENS = 8
BLOCK_SIZE = "16"
"""Of vLLM's MLA on CPU."""


@dataclass
class Seen:
    answers: dict[str, list[list[str]]]
    """The tokens of each answer, by setup."""
    second: list[str]
    """The second token of an engine by itself, of the same prompts."""
    early: dict[str, int]
    """Blocks that left early, by layer and by chunk."""


def deployment(python: Path, made: Path, place: Path, setup: str) -> topology.Deployment:
    injected = topology.with_path(layerwise.variables(setup, place), [str(environments.mooncake(python))])
    found = layerwise.deployment(python, made, VLLM, model.CONTEXT, injected)
    return topology.Deployment(tuple(_with_mla(part) for part in found.parts), found.url)


def _with_mla(part: Part) -> Part:
    words = list(part.command)
    if "--block-size" not in words:
        return part
    for option, value in {"--dtype": "float32", "--block-size": BLOCK_SIZE, "--max-model-len": "2048"}.items():
        words[words.index(option) + 1] = value
    # Processors with AMX have another one, in which float32 is not to be had.
    return dataclasses.replace(part, command=(*words, "--attention-backend", "CPU_MLA"))


async def play(place: Path, python: Path) -> Seen:
    made = mla_model.make(place / "model", seed=0)
    link = place / layerwise.LINK
    link.write_text(LINKS[0], encoding="utf-8")
    answers: dict[str, list[list[str]]] = {setup: [] for setup in SETUPS}
    second = []
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for setup in SETUPS:
            deployed = deployment(python, made, place, setup)
            parts = await stack.enter_async_context(Supervisor(place / setup, print))
            await parts.start(deployed.parts)
            urls = {setup: deployed.url, f"{setup} prefill": deployed.parts[0].health.removesuffix("/health")}
            for name, url in urls.items():
                clients[name] = await stack.enter_async_context(Client(url, topology.MODEL_NAME, 100))
        for rate in LINKS:
            link.write_text(rate, encoding="utf-8")
            for turn in range(TURNS):
                for tokens in TOKENS:
                    (prompt,) = model.prompts(1, tokens - 1, seed=f"{rate} {turn}")
                    alone, _ = await clients["stock prefill"].stream((prompt,), 2)
                    first, following = alone.split()
                    second.append(following)
                    for setup in SETUPS:
                        answer, _ = await clients[setup].stream((f"{prompt} {first}",), ANSWER_TOKENS)
                        answers[setup].append(answer.split())
    return Seen(answers, second, layerwise.counted(place))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    python = environments.engine(VLLM)
    proxy.fetch()
    environments.mooncake(python)
    found = asyncio.run(play(tmp_path_factory.mktemp("mla"), python))
    print(found)
    return found


def test_latent_vectors_left_early(seen: Seen) -> None:
    """How many depends on who is quicker, prefill or decode's ask; as many as the longer prompt has, at least."""
    assert seen.early["layer"] >= max(TOKENS) // int(BLOCK_SIZE)


def test_answers_are_those_of_stock_token_by_token(seen: Seen) -> None:
    assert seen.answers["layer"] == seen.answers["stock"]
    assert len({tuple(answer) for answer in seen.answers["stock"]}) == len(LINKS) * len(TOKENS) * TURNS


def test_the_first_token_is_the_one_of_an_engine_by_itself(seen: Seen) -> None:
    assert [answer[0] for answer in seen.answers["layer"]] == seen.second
