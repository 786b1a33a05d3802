"""Every pinned vLLM release, stock and patched, through requests that fill its pool.

See driver/preemption_livelock.py, and fenced_world.py beside it: contents, answers and fences are looked at in each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.releases import registry

PATCH = "preemption-livelock"
DRIVER = PATCH.replace("-", "_")
RELEASES = [pin.version for pin in registry.pins("vllm")]
NEEDED = [
    release
    for variant in catalogue.load()[PATCH].patch.variants
    if variant.verdict == "needed"
    for release in variant.releases
]
FENCED_FROM, FIXED_IN = "0.24.0", "0.30.0"
MIXES, LIMIT = "12", "600"
"""The longest world that ends takes 272 steps."""
NEVER = {"as reported": 4, "loads": 4, "priorities": 4}
"""Worlds that never end on the releases with the fault, and how many of their requests are left."""
ALONE = {f"LIVEPATCH_{name}": "off" for name in ("STALE_FINISHED_RECVING", "KV_BLOCK_REAPER", "CHUNKED_LMCACHE_LOAD")}


def outcomes(worlds: dict[str, Any]) -> dict[str, str]:
    return {name: world["outcome"] for name, world in worlds.items()}


@pytest.mark.parametrize("release", executed.chosen([RELEASES[0], NEEDED[0]], RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """With fences and the token in flight dropped, all preempt each other for ever; with fences alone, all end."""
    worlds = warm.run(DRIVER, {"vllm": release}, tmp_path, arguments=["0", LIMIT])["worlds"]
    assert outcomes(worlds["Scheduler"]) == dict.fromkeys(worlds["Scheduler"], "finishes")
    fenced, fixed = Version(release) >= Version(FENCED_FROM), Version(release) >= Version(FIXED_IN)
    expected = dict.fromkeys(worlds["AsyncScheduler"], "finishes" if fenced else "blocks of a step in flight are free")
    preempted = {4 if fenced and not fixed else 1}
    if release in NEEDED:
        expected |= {name: f"never ends: {left} of {left} unfinished" for name, left in NEVER.items()}
    else:
        assert {worlds["AsyncScheduler"][name]["preemptions"] for name in NEVER} == preempted
    assert outcomes(worlds["AsyncScheduler"]) == expected


@pytest.fixture(scope="module")
def without_the_fault(warm: interpreter.Interpreter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each world comes to on the first release that upstream mended."""
    work = tmp_path_factory.mktemp("fixed")
    worlds: dict[str, Any] = warm.run(DRIVER, {"vllm": FIXED_IN}, work, arguments=[MIXES, LIMIT])["worlds"]
    return worlds


@pytest.mark.parametrize("environ", [{}, ALONE], ids=["beside the others", "alone"])
@pytest.mark.parametrize("release", executed.first(NEEDED))
def test_patched(
    release: str,
    environ: dict[str, str],
    warm: interpreter.Interpreter,
    bundle: Path,
    without_the_fault: dict[str, Any],
    tmp_path: Path,
) -> None:
    """All end, with right answers, in the steps and with the preemptions of the release that upstream mended."""
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle, environ=environ, arguments=[MIXES, LIMIT])
    assert run["worlds"] == without_the_fault
    for worlds in run["worlds"].values():
        assert outcomes(worlds) == dict.fromkeys(worlds, "finishes")
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    assert set(patch["counters"]) == {"waited"}
    assert patch["counters"]["waited"] >= sum(
        world["preemptions"] for world in run["worlds"]["AsyncScheduler"].values()
    )
