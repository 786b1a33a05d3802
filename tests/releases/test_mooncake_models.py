"""KV that leaves early, by the kind of model: MLA's does; what has other caches, or drafts, is sent at its end, as on stock.

The rest is as in test_mooncake_layers.py. Contents are compared where decode computes. What leaves early beside other
caches is in test_mooncake_hybrids.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
import test_mooncake_layers as layers
from packaging.version import Version
from test_mooncake_layerwise import EVERY, expected

PATCH = "mooncake-layerwise"
SHORT = ["by_layer", "amid_a_step", "hits", "preempted", "failed_and_aborted"]
ON = {
    "LIVEPATCH_MOONCAKE_LAYERWISE": "on",
    "LIVEPATCH_MOONCAKE_LAYERWISE_BY": "auto",
    "LIVEPATCH_MOONCAKE_FAILED_LOADS_LOOK_SECONDS": "0.2",
}
AT_THE_END = ["windows", "window", "draft"]
"""Models of mooncake_groups.py."""
BY_GROUP = Version("0.25.1")
"""The first release that writes a group's blocks into that group's layers only, where one group may leave early."""

EIGHT, THREE = "8 of 8", "3 of 3"


def at_the_end(release: str) -> dict[str, Any]:
    """No write before the end; on what decode computes; blocks that the write brought, and that do not come back."""
    cases = {
        # All eleven blocks of each layer.
        "windows": [[0, 0, 0], [239, EIGHT, EIGHT, THREE], [11.0], 0, 0],
        "window": [[0, 0, 0], [239, THREE, THREE, THREE], [3.0], 0, 0],
        "draft": [[0, 0, 0], [239, EIGHT, EIGHT, EIGHT], [8.0], 0, 0],
    }
    return {name: cases[name] for name in models(release)}


def models(release: str) -> list[str]:
    return [name for name in AT_THE_END if name != "windows" or Version(release) < BY_GROUP]


@pytest.mark.parametrize("release", executed.chosen(["0.33.0"], EVERY))
def test_mla_stock(release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path) -> None:
    run = warm.run("mooncake_mla", {"vllm": release}, tmp_path, path=mooncake, arguments=["0.2", *SHORT])
    assert run["cases"] == expected(release, layers.STOCK, SHORT)


@pytest.mark.parametrize("release", executed.chosen(["0.20.2", "0.33.0"], EVERY))
def test_mla(release: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path) -> None:
    """As of a model with full attention, layer by layer."""
    only = [] if executed.by_hand() else SHORT
    given = {"bundle": bundle, "path": mooncake, "arguments": ["0.5", *only], "environ": ON}
    run = warm.run("mooncake_mla", {"vllm": release}, tmp_path, **given)
    assert run["cases"] == expected(release, layers.PATCHED, only)
    assert interpreter.reported(tmp_path, PATCH)["counters"]["layers"] > 0


@pytest.mark.parametrize("release", executed.chosen(["0.33.0"], EVERY))
def test_mla_by_chunk(
    release: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path
) -> None:
    given = {"bundle": bundle, "path": mooncake, "environ": {**ON, "LIVEPATCH_MOONCAKE_LAYERWISE_BY": "chunk"}}
    run = warm.run("mooncake_mla", {"vllm": release}, tmp_path, arguments=["0.5", "by_layer"], **given)
    assert run["cases"] == {"by_layer": layers.BY_CHUNK_STEPS}


@pytest.mark.parametrize("release", executed.chosen(["0.33.0"], EVERY))
def test_at_the_end_stock(release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path) -> None:
    run = warm.run("mooncake_groups", {"vllm": release}, tmp_path, path=mooncake, arguments=["0.1", *models(release)])
    assert run["cases"] == at_the_end(release)


@pytest.mark.parametrize("release", executed.chosen(["0.20.2", "0.33.0"], EVERY))
def test_at_the_end(
    release: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path
) -> None:
    """As on stock: the patch applies, and nothing leaves early."""
    given = {"bundle": bundle, "path": mooncake, "arguments": ["0.5", *models(release)], "environ": ON}
    run = warm.run("mooncake_groups", {"vllm": release}, tmp_path, **given)
    assert run["cases"] == at_the_end(release)
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed")
    assert not any(patch["counters"].values()), patch["counters"]
