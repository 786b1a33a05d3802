"""Two LoRA adapters and the base model of a real engine, the same prompt to each, beside a real LMCache server.

The answers of three engines are compared: without LMCache, with it, and with the bundle. None has a prefix cache of its
own, so that each request asks LMCache.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import save_file
from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.lab import environments, model, topology
from vllm_livepatch.tools.lab.client import Client
from vllm_livepatch.tools.lab.supervisor import Supervisor
from vllm_livepatch.tools.lab.topology import CHUNK_SIZE, MODEL_NAME

from tests.e2e import by_hand

pytestmark = by_hand

VLLM, LMCACHE = "0.32.0", "0.5.6"
HITS = "vllm:external_prefix_cache_hits_total"
PROMPT_TOKENS, ANSWER_TOKENS, RANK = 300, 12, 8
STORED = PROMPT_TOKENS // CHUNK_SIZE * CHUNK_SIZE
ASKED = ("org/first", "second", MODEL_NAME, "org/first", "second", MODEL_NAME)
"""Whose answer each request is to be."""


@dataclass
class Came:
    answers: list[str]
    hits: list[float]
    """Of each request: tokens that came from LMCache."""


def adapter(directory: Path, seed: int) -> Path:
    """An adapter of the attention, in PEFT's format, drawn from a seed; it changes keys, values and answers."""
    draw = np.random.default_rng(seed)
    tensors = {}
    for layer in range(model.LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = draw.standard_normal((RANK, model.HIDDEN), dtype=np.float32) / 8
            tensors[f"{prefix}.lora_B.weight"] = draw.standard_normal((model.HIDDEN, RANK), dtype=np.float32) / 8
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none", "task_type": "CAUSAL_LM"}
    described["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    (directory / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    return directory


async def play(work: Path, name: str, made: Path, loras: Mapping[str, Path], injected: Mapping[str, str]) -> Came:
    described = topology.load(name)
    modules = [f"{lora}={path}" for lora, path in loras.items()]
    more = ("--no-enable-prefix-caching", "--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", *modules)
    roles = tuple(
        replace(role, arguments=(*role.arguments, *more)) if role.kind == "engine" else role for role in described.roles
    )
    python = environments.engine(VLLM, LMCACHE)
    given = {**environments.vllm_cache(VLLM), **injected}
    deployed = topology.local(replace(described, roles=roles), python, made, given)
    (url,) = (part.health.removesuffix("/health") for part in deployed.parts if part.name == "engine")
    (prompt,) = model.prompts(1, PROMPT_TOKENS, seed=3)
    came = Came([], [])
    timeout = aiohttp.ClientTimeout(total=120)
    async with Supervisor(work, print) as parts, aiohttp.ClientSession(timeout=timeout) as http:
        await parts.start(deployed.parts)
        async with Client(url, MODEL_NAME, timeout=120) as client:
            for asked in ASKED:
                before = await client.metric(HITS) if name == "lmcache" else 0.0
                body = {"model": asked, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
                async with http.post(f"{url}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    came.answers.append((await answer.json())["choices"][0]["text"])
                after = await client.metric(HITS) if name == "lmcache" else 0.0
                came.hits.append(after - before)
    return came


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Came]:
    work = tmp_path_factory.mktemp("adapters")
    made = model.make(work / "model", seed=1)
    loras = {"org/first": adapter(work / "first", 1), "second": adapter(work / "second", 2)}
    placing.write_directory(bundle.contents(catalogue.load()), work / "bundle")
    (work / "state").mkdir()
    patched = {"PYTHONPATH": str(work / "bundle"), "LIVEPATCH_STATE_DIR": str(work / "state"), "LIVEPATCH": "strict"}
    patched["LIVEPATCH_LMCACHE_CACHE_IDENTITY"] = "on"
    setups: dict[str, tuple[str, Mapping[str, str]]] = {
        "alone": ("engine", {}),
        "stock": ("lmcache", {}),
        "patched": ("lmcache", patched),
    }
    found = {
        setup: asyncio.run(play(work / setup, name, made, loras, injected))
        for setup, (name, injected) in setups.items()
    }
    for setup, came in found.items():
        print(f"{setup}: {came.hits} {came.answers}")
    return found


def test_the_adapters_answer_otherwise(seen: dict[str, Came]) -> None:
    assert len(set(seen["alone"].answers)) == 3, "adapters that change nothing show nothing"


def test_stock_answers_from_another_adapters_kv(seen: dict[str, Came]) -> None:
    assert seen["stock"].hits == [0, *[STORED] * 5]
    right = [mine == own for mine, own in zip(seen["stock"].answers, seen["alone"].answers, strict=True)]
    assert right == [True, False, False, True, False, False]


def test_patched_loads_each_ones_own(seen: dict[str, Came]) -> None:
    assert seen["patched"].answers == seen["alone"].answers
    assert seen["patched"].hits == [0, 0, 0, *[STORED] * 3]
