"""KV that leaves early where layers share memory, and where decode asks for more than prefill has tasks to answer.

The rest is as in test_mooncake_layers.py, whose contents these are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
import test_mooncake_layers as layers
from packaging.version import Version
from test_mooncake_layerwise import ALL, EVERY, expected
from test_mooncake_models import ON

PATCH = "mooncake-layerwise"
ROWS = [release for release in EVERY if Version(release) >= Version("0.32")]
"""From there on layers that lie one behind the other in each block's row are written as one region."""
CASES = ["by_layer", "hits", "preempted", "failed_and_aborted"]
ONE_REGION = 1

TASKS = 4
ASKS = TASKS + 3
LAYOUTS = Version("0.33")
"""From there on decode tells a prefill worker once where its caches are."""


def rows(cases: dict[str, Any]) -> dict[str, Any]:
    return {**{name: cases[name] for name in CASES}, "regions": ONE_REGION}


def crowd(release: str, early: int) -> dict[str, Any]:
    """`early`: how many blocks have come after a step."""
    layout = [1, early, [ALL, ALL], 0] if Version(release) >= LAYOUTS else None
    return {"crowd": [TASKS, early > 0, [ALL] * ASKS, 0], "layout": layout}


@pytest.mark.parametrize("release", executed.chosen(["0.33.0"], ROWS))
def test_rows_stock(release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path) -> None:
    run = warm.run("mooncake_rows", {"vllm": release}, tmp_path, path=mooncake, arguments=["0.2", *CASES, "regions"])
    assert run["cases"] == rows(expected(release, layers.STOCK, CASES))


@pytest.mark.parametrize("release", executed.chosen(["0.33.0"], ROWS))
def test_rows_leave_by_chunk(
    release: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path
) -> None:
    """No layer is sent before the step has ended, though it was asked for: a row has all of them."""
    given = {"bundle": bundle, "path": mooncake, "arguments": ["0.5", *CASES, "regions"], "environ": ON}
    run = warm.run("mooncake_rows", {"vllm": release}, tmp_path, **given)
    by_chunk = {**expected(release, layers.chunk.PATCHED, CASES), "by_layer": layers.BY_CHUNK_STEPS}
    assert run["cases"] == rows(by_chunk)
    counters = interpreter.reported(tmp_path, PATCH)["counters"]
    assert counters["early"] > 0
    assert "layers" not in counters


@pytest.mark.parametrize("release", executed.chosen(["0.33.0"], EVERY))
def test_more_asks_than_tasks_stock(
    release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path
) -> None:
    run = warm.run("mooncake_crowd", {"vllm": release}, tmp_path, path=mooncake, arguments=["0.2"])
    assert run["cases"] == crowd(release, early=0)


@pytest.mark.parametrize("lost_asks", ["auto", "off"])
@pytest.mark.parametrize("release", executed.chosen(["0.20.2", "0.33.0"], EVERY))
def test_more_asks_than_tasks(
    release: str, lost_asks: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path
) -> None:
    """With `mooncake-lost-asks` an ask takes no task while it waits; without it the last ones are taken late."""
    environ = {**ON, "LIVEPATCH_MOONCAKE_LOST_ASKS": lost_asks}
    given = {"bundle": bundle, "path": mooncake, "arguments": ["0.5"], "environ": environ}
    run = warm.run("mooncake_crowd", {"vllm": release}, tmp_path, **given)
    assert run["cases"] == crowd(release, early=2)
    assert "failed" not in interpreter.reported(tmp_path, PATCH)["counters"]
