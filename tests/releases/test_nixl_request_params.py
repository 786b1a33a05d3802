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
        assert cases.get("clients_that_left", 0) == 0, (name, cases)
    assert worker["well"] == worker["after"], worker
    odd = ("too_few", "none", "more_groups") if in_groups(release) else ("too_few", "none")
    for case in odd:
        assert worker[case] == {"failed": True, "blocks": [5, 6]}, (case, worker)
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
