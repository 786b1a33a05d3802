"""32 stored prompts at once through a pool of four: a real engine and LMCache server, against one without offload."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e import by_hand

pytestmark = by_hand
PROMPTS, TOKENS = 32, 16


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the benchmark finds, in one round of two of its setups."""
    out = tmp_path_factory.mktemp("chunked-load") / "figures.json"
    command = [sys.executable, "-m", "vllm_livepatch.tools.bench.chunked_load", "--setups", "none", "parts"]
    command += ["--model", "tiny", "--rounds", "1", "--prompts", str(PROMPTS), "--out", str(out)]
    given = os.environ.get("LIVEPATCH_TEST_PYTHON")
    subprocess.run([*command, *(["--engine-python", given] if given else [])], check=True)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_outputs_are_those_without_offload(figures: dict[str, Any]) -> None:
    assert len(set(figures["none"]["outputs"])) > PROMPTS // 2, "a model that always says the same shows nothing"
    assert figures["parts"]["outputs"] == figures["none"]["outputs"]
    assert [entry["other_outputs"] for setup in figures.values() for entry in setup["rounds"]] == [0, 0]


def test_what_is_stored_is_loaded_and_in_parts(figures: dict[str, Any]) -> None:
    (played,) = figures["parts"]["rounds"]
    assert played["hit_share"] >= 0.95
    # 1024 stored tokens of each prompt in parts of 256: three after the first.
    assert figures["parts"]["counters"]["further_parts"] >= 0.95 * 3 * PROMPTS
    assert figures["parts"]["counters"]["held_back"] > 0, "the pool was never short"
