"""A model that vLLM compiles, stock and with a diff of its code: each uses its own compiled artifacts.

By hand (`E2E=all`), before a release: CI's engines are eager, and what it has of torch.compile is
tests/releases/test_traced.py, without an engine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm_livepatch.tools.lab import environments, model, topology
from vllm_livepatch.tools.releases import sources

from tests.e2e import by_hand
from tests.releases import source_diffs

pytestmark = by_hand
VLLM = "0.32.0"
DRIVER = Path(__file__).with_name("compiled_engine.py")
LLAMA = "vllm/model_executor/models/llama.py"
# The output of each layer's MLP, halved twice: in the traced code, and seen in the output.
CHANGE = [("x, _ = self.down_proj(x)\n        return x\n", "x, _ = self.down_proj(x)\n        return x * 0.25\n")]
SECONDS = 400


@dataclass(frozen=True)
class Run:
    """What one engine gave: its output, and the ahead-of-time artifacts that it loaded and saved, by their key."""

    output: str
    loaded: set[str]
    saved: set[str]


@dataclass(frozen=True)
class Engine:
    """Runs engines that share one cache of vLLM's, below `work`."""

    python: Path
    work: Path
    bundle: Path

    def run(self, name: str, injected: Mapping[str, str]) -> Run:
        own = {
            "VLLM_CACHE_ROOT": str(self.work / "cache"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process instead of three
            "XDG_CACHE_HOME": str(self.work / "user"),
            "LIVEPATCH_STATE_DIR": str(self.work / f"state-{name}"),
            "LIVEPATCH_STATE_KEEP": "1",
        }
        environ = topology.environment(self.python, {**own, **injected})
        command = [str(self.python), str(DRIVER), str(self.work / "model"), model.prompts(1, 20, 1)[0]]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
        log = done.stdout + done.stderr
        (self.work / f"{name}.log").write_text(log, "utf-8")
        assert done.returncode == 0, log[-4000:]
        key = r"/torch_aot_compile/([0-9a-f]{64})/"
        return Run(
            json.loads(done.stdout.splitlines()[-1]),
            set(re.findall(f"Directly load AOT compilation from path .*{key}", log)),
            set(re.findall(f"saved AOT compiled function to .*{key}", log)),
        )

    def graphs(self) -> set[str]:
        """The directories of compiled graphs, by the key of vLLM's other cache."""
        names = os.listdir(self.work / "cache" / "torch_compile_cache")
        return {name for name in names if name != "torch_aot_compile"}

    def model_files(self) -> set[str]:
        return set(os.listdir(self.work / "cache" / "modelinfos"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    work = tmp_path_factory.mktemp("compiled")
    model.make(work / "model", seed=1)
    change = source_diffs.replacing(sources.site_packages("vllm", VLLM), {LLAMA: CHANGE})
    (work / "change.diff").write_text(change, "utf-8")
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli"]
    made = ["from-diff", str(work / "change.diff"), "--name", "smaller-mlp", "--out", str(work / "mine")]
    subprocess.run([*command, *made], check=True, capture_output=True)
    generated = ["generate", "--out", str(work / "bundle"), "--patch", "smaller-mlp", "--patch-dir", str(work / "mine")]
    subprocess.run([*command, *generated], check=True, capture_output=True)
    given = os.environ.get("LIVEPATCH_TEST_PYTHON")
    return Engine(Path(given) if given else environments.engine(VLLM), work, work / "bundle")


def test_stock_patched_and_stock_again_each_use_their_own(engine: Engine) -> None:
    patched = {"PYTHONPATH": str(engine.bundle)}
    unguarded = {**patched, "LIVEPATCH_COMPILE_CACHE_KEY": "off"}

    stock = engine.run("stock", {})
    assert stock.loaded == set()
    assert len(stock.saved) == 1
    assert len(engine.graphs()) == 1

    with ThreadPoolExecutor() as pool:
        # What the patch of the key is for: without it, the changed model runs as stock compiled it.
        fault = pool.submit(engine.run, "unguarded", unguarded)
        first = pool.submit(engine.run, "patched", patched)
        assert fault.result() == Run(stock.output, loaded=stock.saved, saved=set())
        changed = first.result()
    assert changed.output != stock.output
    assert changed.loaded == set()
    assert len(changed.saved | stock.saved) == 2
    assert len(engine.graphs()) == 2
    (stock_file, changed_file) = sorted(engine.model_files(), key=len)
    assert changed_file.startswith(stock_file.removesuffix(".json") + "-")

    with ThreadPoolExecutor() as pool:
        again = pool.submit(engine.run, "patched-again", patched), pool.submit(engine.run, "stock-again", {})
        assert again[0].result() == Run(changed.output, loaded=changed.saved, saved=set())
        assert again[1].result() == Run(stock.output, loaded=stock.saved, saved=set())
    assert len(engine.graphs()) == 2
    assert engine.model_files() == {stock_file, changed_file}


def test_the_patched_engine_reports_both(engine: Engine) -> None:
    reports = [json.loads(file.read_text("ascii")) for file in (engine.work / "state-patched").glob("*.json")]
    states = {patch["name"]: patch["state"] for report in reports for patch in report["patches"]}
    assert states == {"compile-cache-key": "applied", "smaller-mlp": "applied"}
