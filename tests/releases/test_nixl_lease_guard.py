"""Every pinned vLLM's real NIXL workers and real NIXL agents: blocks are read under leases that hold, and that end.

Stock takes another request's contents for its own and reports a successful load. Patched, each such load is reported as
failed, with all of its blocks (from 0.30.0 by its request id, too), and a read under a lease is as before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from prefill_decode_drive import nixl_site
from vllm_livepatch.tools.releases import registry

DRIVER = "lease_guard"
PATCH = "nixl-lease-guard"
RELEASES = [pin.version for pin in registry.pins("vllm")]
LATE = ("late", "same_id", "aborted", "passed", "hybrid", "asleep")

WELL = {"contents": ["its own"], "failed": False, "invalid": None}
WRONG = {"contents": ["another's"], "failed": False, "invalid": None}
FAILED = {"contents": ["another's"], "failed": True, "invalid": True}
READ = {**WELL, "was_notified": True}
STOCK = {
    "in_time": READ,
    **dict.fromkeys(LATE, WRONG),
    "again": {"first": WELL, "second": WRONG},
    "stopped": {"failed": False},
    "two_reads": {"while_read": [], "failed": False, "afterwards": []},
    "decode_without": READ,
    "prefill_without": {"in_time": READ, "late": WRONG},
}


def patched(release: str) -> dict[str, Any]:
    """A load that failed names its blocks; from 0.30.0, of a model with several kinds of layers, its request alone."""
    named = {**FAILED, "invalid": None} if Version(release) >= Version("0.30") else FAILED
    return {
        **STOCK,
        **dict.fromkeys(LATE, FAILED),
        "again": {"first": WELL, "second": FAILED},
        "stopped": {"failed": True},
        "two_reads": {"while_read": [], "failed": True, "afterwards": []},
        "hybrid": named,
    }


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, engine_python: Path, tmp_path: Path) -> None:
    """What lies in the blocks by the time of the read is taken for the request's own, and nothing is reported."""
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, path=[nixl_site(engine_python)])
    assert run["cases"] == STOCK


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(
    release: str, warm: interpreter.Interpreter, engine_python: Path, bundle: Path, tmp_path: Path
) -> None:
    """Wrong contents are a failed load; a prefill without the patch is read as on stock, and a decode without it reads."""
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle, path=[nixl_site(engine_python)])
    assert run["cases"] == patched(release)
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    assert patch["counters"] == {
        "lease_held": 2,  # in_time, and again's first
        "lease_lost": 10,
        "lease_ended": 8,  # all of LATE's but `aborted`, `stopped`, and the one before `passed`
        "not_vouched": 1,  # same_id's second request
        "peer_unguarded": 1,
    }
