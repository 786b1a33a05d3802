"""A decode engine is killed after its prefill was answered: real vLLM 0.29.0 and NIXL, on CPU memory.

Four engines: a stock and a patched prefill engine, a decode engine that is killed and one that lives. The one that lives
is busy: what it was promised waits in its queue, its lease renewed, while the dead one's lease runs out behind it. On
stock that strands the dead one's blocks (vllm#58222).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from filelock import FileLock
from vllm_livepatch.tools import bundle, catalogue, environments
from vllm_livepatch.tools.lab import model
from vllm_livepatch.tools.lab.supervisor import Part, Supervisor
from vllm_livepatch.tools.lab.topology import BLOCK_SIZE, MODEL_NAME, environment, free_ports

VLLM = "0.29.0"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
LEASE_SECONDS = 6
PROMPT_TOKENS = 8 * BLOCK_SIZE
BUSY_TOKENS = 1500
STRANDED_SECONDS = 3 * LEASE_SECONDS
"""How long the blocks are watched after the kill, at most; the lease is over after a third of it."""


@dataclass
class Side:
    """What was seen of one prefill engine."""

    held: float = 0.0  # share of the KV cache that is held as the decode engine is killed
    usage: list[float] = field(default_factory=list)  # from then on, while the other decode engine's request waits
    waiting: list[bool] = field(default_factory=list)  # whether that request still waited as usage was looked up
    output: str = ""  # what that request came to
    at_end: float = 1.0
    idle_cpu: float = 0.0  # CPU seconds a second of the engine core while blocks are held, and nothing runs
    freed_cpu: float = 0.0  # the same when none are held


@dataclass
class Seen:
    stock: Side
    patched: Side
    undisturbed: str  # the output that was to be expected, by a decode engine alone
    status: list[dict[str, Any]]


def nixl_site(python: Path) -> Path:
    """A directory with the real NIXL, to be put on PYTHONPATH: an engine's environment is without it."""
    asked = [str(python), "-c", "import sys; print(sys.implementation.cache_tag)"]
    tag = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    site = environments.cache_directory() / "environments" / f"nixl-1.5.1-{tag}"
    site.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{site}.lock"):
        if not (site / "complete").exists():
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
            subprocess.run([*pip, "--no-deps", "--target", str(site), *NIXL], check=True)
            (site / "complete").touch()
    return site


def engine(name: str, python: Path, weights: Path, path: list[Path], state: Path, *more: str) -> tuple[Part, str]:
    """An engine that serves the model with NIXL, and its URL; `path` goes on PYTHONPATH."""
    http, side = free_ports(2)
    connector = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
    }
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "LIVEPATCH_STATE_DIR": str(state),
        "OMP_NUM_THREADS": "1",
        "UCX_TLS": "tcp,self,sm",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side),
    }
    part = Part(
        name=name,
        command=(
            *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(weights), "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(http)),
            *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE), "--max-model-len", "2048"),
            *("--num-gpu-blocks-override", "200", "--no-enable-prefix-caching"),
            *("--kv-transfer-config", json.dumps(connector)),
            *more,
        ),
        environment=environment(python, variables),
        health=f"http://127.0.0.1:{http}/health",
        beside=True,
    )
    return part, f"http://127.0.0.1:{http}"


class Client:
    """Asks engines over HTTP."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def complete(self, url: str, prompt: str, tokens: int, transfer: dict[str, Any] | None) -> dict[str, Any]:
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        if transfer is not None:
            body["kv_transfer_params"] = transfer
        async with self.session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = await answer.json()
            return found

    async def prefill(self, url: str, prompt: str) -> dict[str, Any]:
        """Have a prompt's KV made and kept; what a decode engine must be told to get it."""
        found = await self.complete(url, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        transfer: dict[str, Any] = found["kv_transfer_params"]
        return transfer

    async def decode(self, url: str, prompt: str, transfer: dict[str, Any] | None) -> str:
        return str((await self.complete(url, prompt, 16, transfer))["choices"][0]["text"])

    async def usage(self, url: str) -> float:
        """The share of the KV cache that is in use, as the engine last reported it."""
        async with self.session.get(f"{url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return float(next(line for line in lines if line.startswith("vllm:kv_cache_usage_perc{")).rpartition(" ")[2])


def kill(parts: Supervisor, name: str) -> None:
    """End the processes of a part as a machine's end would: SIGKILL, all at once."""
    for entry in parts.processes():
        if entry["part"] == name and "launcher" not in " ".join(entry["command"]):
            os.kill(int(entry["pid"]), signal.SIGKILL)


def core_cpu(parts: Supervisor, name: str) -> float:
    """CPU seconds of a part's engine core so far."""
    (pid,) = [row["pid"] for row in parts.processes() if row["part"] == name and row["name"] == "VLLM::EngineCore"]
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def play(work: Path, python: Path) -> Seen:
    site = nixl_site(python)
    bundle.write_directory(bundle.contents(catalogue.load()), work / "bundle")
    weights = model.make(work / "model")
    prompts = model.prompts(6, PROMPT_TOKENS, seed=3)
    state = work / "state"
    stock, stock_url = engine("stock", python, weights, [site], state)
    patched, patched_url = engine("patched", python, weights, [work / "bundle", site], state)
    alive, alive_url = engine("alive", python, weights, [site], state, "--max-num-seqs", "1")
    dying, dying_url = engine("dying", python, weights, [site], state)
    urls = {"stock": stock_url, "patched": patched_url}
    sides = {name: Side() for name in urls}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as session,
        Supervisor(work / "living", print) as parts,
        Supervisor(work / "dead", print) as others,
    ):
        client = Client(session)
        await asyncio.gather(parts.start([stock, patched, alive]), others.start([dying]))
        undisturbed = await client.decode(alive_url, prompts[0], None)
        for name, url in urls.items():
            for decoder in (alive_url, dying_url):  # both are peers, and have been told where the blocks are
                assert await client.decode(decoder, prompts[0], await client.prefill(url, prompts[0])) == undisturbed, (
                    name
                )
        busy = [asyncio.create_task(client.complete(alive_url, prompts[1], BUSY_TOKENS, None)) for _ in range(6)]
        await asyncio.sleep(1)
        promised = {}
        for name, url in urls.items():
            transfer = await client.prefill(url, prompts[0])
            promised[name] = asyncio.create_task(client.decode(alive_url, prompts[0], transfer))
            for prompt in prompts[2:]:  # for the decode engine that dies
                await client.prefill(url, prompt)
        kill(others, "dying")
        cpu = {name: core_cpu(parts, name) for name in urls}
        begun = time.monotonic()
        for name, url in urls.items():
            sides[name].held = await client.usage(url)
        while time.monotonic() < begun + STRANDED_SECONDS:
            await asyncio.sleep(1)
            for name, url in urls.items():
                sides[name].usage.append(await client.usage(url))
                sides[name].waiting.append(not promised[name].done())
        for name in urls:
            sides[name].idle_cpu = (core_cpu(parts, name) - cpu[name]) / (time.monotonic() - begun)
        for task in busy:
            task.cancel()
        for name, task in promised.items():
            sides[name].output = await task
        await asyncio.sleep(2 * LEASE_SECONDS)
        cpu = {name: core_cpu(parts, name) for name in urls}
        begun = time.monotonic()
        await asyncio.sleep(3)
        for name, url in urls.items():
            sides[name].freed_cpu = (core_cpu(parts, name) - cpu[name]) / (time.monotonic() - begun)
            sides[name].at_end = await client.usage(url)
        status = [json.loads(file.read_text(encoding="utf-8")) for file in state.glob("**/*.json")]
    return Seen(sides["stock"], sides["patched"], undisturbed, status)


def _python() -> Path:
    """The interpreter of an environment with this vLLM: LIVEPATCH_TEST_PYTHON_0_29, else one built for it."""
    given = os.environ.get("LIVEPATCH_TEST_PYTHON_0_29")
    return Path(given) if given else environments.engine(VLLM)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    found = asyncio.run(play(tmp_path_factory.mktemp("reaper"), _python()))
    print(found)
    return found


def test_the_dead_peers_blocks_come_back_while_the_other_still_waits(seen: Seen) -> None:
    assert all(seen.patched.waiting), "the other request was to wait all the time"
    only_the_others = seen.patched.usage[-1]
    assert 0 < only_the_others < seen.patched.held / 3
    assert seen.patched.usage[2 * LEASE_SECONDS] == only_the_others


def test_stock_strands_them(seen: Seen) -> None:
    assert all(seen.stock.waiting)
    assert seen.stock.held == seen.patched.held
    assert set(seen.stock.usage) == {seen.stock.held}


def test_the_other_transfer_completes_with_the_right_output(seen: Seen) -> None:
    assert seen.patched.output == seen.undisturbed
    assert seen.stock.output == seen.undisturbed


def test_nothing_is_held_and_the_core_sleeps_in_the_end(seen: Seen) -> None:
    assert seen.patched.at_end == 0
    assert seen.patched.idle_cpu > 2 * seen.patched.freed_cpu


def test_it_was_the_patch(seen: Seen) -> None:
    counters: dict[str, int] = {}
    for report in seen.status:
        for patch in report["patches"]:
            if patch["name"] == "kv-block-reaper":
                for kind, number in patch["counters"].items():
                    counters[kind] = counters.get(kind, 0) + number
    assert counters["stranded"] >= 4
    assert counters.get("reaped", 0) == 0, "no hold was older than any lease"
