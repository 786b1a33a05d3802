"""Every pinned vLLM's real scheduler and connectors, and NIXL's real workers: requests with odd `kv_transfer_params`.

Stock raises in the engine core or in the worker, or waits for ever with the request's blocks. Patched, each such prompt is
computed, no block stays held, and what is well-formed is as on stock.
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

DRIVER = "request_params"
PATCH = "nixl-request-params"
RELEASES = [pin.version for pin in registry.pins("vllm")]
OFFLOADING = executed.chosen(["0.26.0", "0.33.0"], [one for one in RELEASES if Version(one) >= Version("0.25.1")])
WELL = ("none", "another's", "whole", "prefill")
BOTH = {"mooncake_decode": "AssertionError"}
"""Of whom stock makes what of a request that loads its KV and keeps it for another engine; all others load it."""


@pytest.fixture(scope="module")
def path(engine_python: Path, mooncake: list[Path]) -> list[Path]:
    """NIXL and Mooncake, which the connectors import."""
    return [nixl_site(engine_python), *mooncake]


def run(
    release: str, warm: interpreter.Interpreter, path: list[Path], work: Path, bundle: Path | None = None
) -> dict[str, Any]:
    """What each case came to, by connector and role."""
    cases: dict[str, Any] = warm.run(DRIVER, {"vllm": release}, work, bundle=bundle, path=path)["cases"]
    return cases


def in_groups(release: str) -> bool:
    """Whether the release names blocks by KV cache group."""
    return Version(release) >= Version("0.18")


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, path: list[Path], tmp_path: Path) -> None:
    """One request ends the engine core, or waits for ever; too few blocks end the worker."""
    found = run(release, warm, path, tmp_path)
    worker = found.pop("worker")
    assert worker["too_few"].startswith("AssertionError"), worker
    assert worker["well"] == worker["after"], worker
    for name, cases in found.items():
        assert cases["alone"] != "computed", (name, cases)
        assert cases["none"] == cases["another's"] == "computed", (name, cases)
        # On 0.14.1 the decode side of Mooncake does not assert: it waits.
        assert cases.get("both", "waits").startswith((BOTH.get(name, "waits"), "waits")), (name, cases)
        assert len(cases["not_computed"]) > 5 or name == "mooncake_prefill", (name, cases)


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, path: list[Path], bundle: Path, tmp_path: Path) -> None:
    """All of them are computed here, and leave nothing behind; those that are whole wait for their KV."""
    found = run(release, warm, path, tmp_path, bundle)
    worker = found.pop("worker")
    for name, cases in found.items():
        assert cases["not_computed"] == [], (name, cases)
        assert cases["none"] == cases["another's"] == cases["prefill"] == "computed", (name, cases)
        assert cases.get("whole", "waits") == "waits", (name, cases)
        assert cases.get("both", "waits") == ("computed" if name in BOTH else "waits"), (name, cases)
        assert cases.get("read_back", "computed") == "computed", (name, cases)
        assert cases.get("numpy", "waits") == "waits", (name, cases)
        assert cases.get("clients_that_left", 0) == 0, (name, cases)
    assert worker["well"] == worker["after"], worker
    odd = ("too_few", "none", "more_groups") if in_groups(release) else ("too_few", "none")
    for case in odd:
        assert worker[case] == {"failed": True, "blocks": [5, 6]}, (case, worker)
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch


def offloading(release: str) -> tuple[bool, bool, bool]:
    """Whether the OffloadingConnector has a P2P tier, one that asks before it loads, and what is stored amid a block."""
    version = Version(release)
    return version >= Version("0.25.1"), version >= Version("0.27.1"), version >= Version("0.28")


@pytest.mark.parametrize("release", OFFLOADING)
def test_offloading_stock(release: str, warm: interpreter.Interpreter, path: list[Path], tmp_path: Path) -> None:
    """Another engine that is named oddly, two requests with one id, and a limit that is within a block end the engine."""
    found = warm.run(f"{DRIVER}_offloading", {"vllm": release}, tmp_path, path=path)
    _, asks, limits = offloading(release)
    assert any("Error" in outcome for outcome in found["peers"]["odd"]), found
    assert found["peers"]["well"] == "waits", found
    assert found["peers"].get("shared") == ("AssertionError in request_blocks" if asks else None), found
    assert found.get("limits", {}).get("16", "") == (
        "AssertionError in _build_partial_tail_store_jobs" if limits else ""
    )


@pytest.mark.parametrize("release", OFFLOADING)
def test_offloading_patched(
    release: str, warm: interpreter.Interpreter, path: list[Path], bundle: Path, tmp_path: Path
) -> None:
    """They are computed here, or less is stored; what is well-formed is as on stock."""
    found = warm.run(f"{DRIVER}_offloading", {"vllm": release}, tmp_path, bundle=bundle, path=path)
    peers, limits = found["peers"], found.get("limits")
    assert peers["odd"] == [], peers
    assert (peers["well"], peers["sessions"], peers["served"], peers["neither"]) == ("waits", 1, "computed", "computed")
    assert (peers.get("asks", "waits"), peers.get("shared", "computed")) == ("waits", "computed"), peers
    if limits is not None:
        assert {limits[limit] for limit in ("None", "96", "-1", "True", "'16'", "[16]", "1000")} == {limits["None"]}, (
            limits
        )
        assert limits["16"] < limits["95"] < limits["None"], limits
    counted = interpreter.reported(tmp_path, PATCH)["counters"].keys()
    _, asks, has_limits = offloading(release)
    assert counted == {"refused", *(["shared_id"] if asks else []), *(["beyond_limit"] if has_limits else [])}, counted
