"""The lab's prefill and decode deployment, with NIXL between them, LMCache behind the prefill engine, and the router.

Clients hang up, and the LMCache server is killed and comes back; half of them stream, half of them chat.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

LOAD = "storm:prompts=6,api=half,stream=half,share=0.4"
FAULTS = ("disconnects", "kill-lmcache@5+3")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("lab")
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", "lab", "pd-nixl-lmcache", "--load", LOAD]
    command += [word for fault in FAULTS for word in ("--fault", fault)]
    command += ["--with", "mq_timeout=2", "--with", "lease=6", "--seconds", "12", "--clients", "6", "--out", str(out)]
    # Progress (stderr) goes where pytest puts it: it is what one needs to see when the run fails.
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    found: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))["setups"]["patched"]
    return found


def test_it_lives_on_with_right_outputs(setup: dict[str, Any]) -> None:
    assert setup["survived"]
    assert setup["mismatches"] == 0
    assert setup["failed"] == 0, setup["errors"]
    assert (setup["restarts"], setup["disconnected"] > 0) == ({"lmcache": 1}, True)


def test_the_cache_and_the_other_engine_were_of_use(setup: dict[str, Any]) -> None:
    assert setup["completed"] > 0
    assert setup["loaded_tokens"] > 0


def test_no_block_is_held_in_the_end(setup: dict[str, Any]) -> None:
    assert setup["kv_usage_at_end"] == {"prefill": 0, "decode": 0}
