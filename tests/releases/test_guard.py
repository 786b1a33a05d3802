"""vLLM itself runs the guard, in each of its processes: with a bundle it is silent, without one it says so, or ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from vllm_livepatch.tools.bundles import catalogue

RELEASES = executed.ends(["0.14.1", "0.21.0", "0.29.0", "0.33.0"])
MODULES = sorted({module for entry in catalogue.load().values() for module in entry.patch.modules})
SILENT = {"code": 0, "logged": []}


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("guard") / "guard"
    command = [sys.executable, "-m", "vllm_livepatch", "generate", "--guard", str(place)]
    subprocess.run(command, check=True, capture_output=True)
    return place


def driven(
    warm: interpreter.Interpreter, release: str, guard: Path, work: Path, *arguments: str, **bundles: Path
) -> dict[str, Any]:
    work.mkdir(exist_ok=True)
    environ = {"VLLM_PLUGINS": "livepatch"}
    if "hidden" in bundles:
        environ["LIVEPATCH_TEST_HIDDEN"] = str(bundles["hidden"])
    found: dict[str, Any] = warm.run(
        "guard",
        {"vllm": release},
        work,
        bundle=bundles.get("bundle"),
        environ=environ,
        arguments=arguments,
        path=[guard],
    )
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_a_process_without_a_bundle(
    release: str, guard: Path, bundle: Path, warm: interpreter.Interpreter, tmp_path: Path
) -> None:
    found = driven(warm, release, guard, tmp_path / "stock", *MODULES)
    ways = found["ways"]
    (line,) = ways["auto"]["logged"]
    assert ways["auto"]["code"] == 0
    assert line.startswith("vllm-livepatch: no bundle is armed in this process, nothing is patched: PYTHONPATH=")
    for way in ("strict", "all plugins"):
        assert ways[way]["code"] == 78, way
        (line,) = ways[way]["logged"]
        assert line.startswith("vllm-livepatch: LIVEPATCH=strict: no bundle is armed in this process")
    (line,) = ways["no word of ours"]["logged"]
    assert ways["no word of ours"]["code"] == 0
    assert line.startswith("vllm-livepatch: LIVEPATCH='perhaps' is none of auto, off, strict; it counts as off")
    for way in ("off", "left out"):
        assert ways[way] == SILENT, way
    report = interpreter.reported(tmp_path / "stock", "stale-finished-recving")
    assert (report["state"], report["reason"]) == ("skipped", "late")
    # Each of vLLM's processes asks, when some of what patches are about has been imported.
    assert found["places"].keys() == {"engine_arguments", "worker", "engine_core"}
    assert all("vllm.envs" in imported for imported in found["places"].values())
    assert "vllm.v1.engine.core" in found["places"]["engine_core"]
    armed = driven(warm, release, guard, tmp_path / "armed", bundle=bundle)
    assert armed["ways"] == dict.fromkeys(ways, SILENT)


@pytest.mark.parametrize("release", RELEASES)
def test_a_process_that_the_bundle_did_not_reach(
    release: str, guard: Path, bundle: Path, warm: interpreter.Interpreter, tmp_path: Path
) -> None:
    """It is armed late: what vLLM imports afterwards is patched."""
    found = driven(warm, release, guard, tmp_path, hidden=bundle)["ways"]["hidden"]
    assert found["code"] == 0
    assert found["logged"][0].startswith("vllm-livepatch: the bundle was armed late, by the guard: ")
    assert found["logged"][-1] == "vllm-livepatch: wrapped: True"
