"""The lab's prefill and decode deployment over Mooncake's real transfer engine, both legs asked at once, in short.

Clients hang up, writes take as long as on a slow link, and the patched prefill engine sends layer by layer meanwhile.
The long runs, with stock, are in docs/lab-results.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

LOAD = "storm:prompts=6,share=0.5,stream=no"
FAULTS = ("disconnects", "link=20")
OPTIONS = ("LIVEPATCH_MOONCAKE_LAYERWISE=on", "LIVEPATCH_MOONCAKE_LAYERWISE_BY=layer")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("lab")
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", "lab", "pd-mooncake-both", "--load", LOAD]
    command += [word for fault in FAULTS for word in ("--fault", fault)]
    command += [word for option in OPTIONS for word in ("--set", option)]
    # For so long prefill keeps what a client that hung up early has left: the lab waits until it is back.
    command += ["--with", "abort_timeout=8", "--seconds", "12", "--clients", "6", "--out", str(out)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    found: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))["setups"]["patched"]
    return found


def test_they_live_on_with_right_outputs(setup: dict[str, Any]) -> None:
    assert setup["survived"]
    assert (setup["mismatches"], setup["failed"]) == (0, 0), setup["errors"]
    assert setup["completed"] > 0
    assert setup["disconnected"] > 0


def test_kv_left_early(setup: dict[str, Any]) -> None:
    """Layers at least: on a busy machine a prefill may end before all of a block's have left."""
    assert setup["loaded_tokens"] > 0
    patches = [patch for process in setup["status"] for patch in process["patches"]]
    layers = [patch["counters"].get("layers", 0) for patch in patches if patch["name"] == "mooncake-layerwise"]
    assert sum(layers) > 0


def test_no_block_is_held_in_the_end(setup: dict[str, Any]) -> None:
    assert setup["kv_usage_at_end"] == {"prefill": 0, "decode": 0}
