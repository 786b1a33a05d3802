"""KV that leaves early with tensor parallelism, one worker or two on each side: the rest is as in test_mooncake_layers.py.

Contents are compared by layer, head, K and V, of each of decode's workers: while prefill computes, and when decode does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from test_mooncake_layerwise import EVERY

PATCH = "mooncake-layerwise"
DRIVER = "mooncake_ranks"
SHAPES = ["2-2", "1-2", "2-1"]
"""Workers of prefill's and of decode's."""
BY = ["layer", "chunk"] if executed.by_hand() else ["layer"]

TWO, ONE = [239, 8, 8], [239, 8]
"""What decode's first step has: all tokens but the last, and eight blocks in each of its workers."""
WAITS, HELD = [True, None, 8, 0], [True, True, True]
"""A failed write is not answered; the blocks of all workers are held until their time is over, or the write."""

STOCK: dict[str, Any] = {
    "2-2": {
        "early": [[[0, 0]] * 6, [[0, 0]] * 3, [TWO, [8.0, 8.0], 0, 0]],
        "late": [TWO, [8.0, 8.0], 0, 0],
        "failed": WAITS,
        "aborted": [False, False, True],
    },
    "1-2": {
        "early": [[[0, 0]] * 3, [[0, 0]] * 3, [TWO, [8.0], 0, 0]],
        "late": [TWO, [8.0], 0, 0],
        "failed": WAITS,
        "aborted": [False, False, True],
    },
    "2-1": {
        "early": [[[0]] * 6, [[0]] * 3, [ONE, [8.0, 8.0], 0, 0]],
        "late": [ONE, [8.0, 8.0], 0, 0],
    },
}
STEPS = [[2, 2], [4, 4], [6, 6]]
FIRST, BOTH = [2, 0, 0], [2, 2, 0]
"""The first layer of two blocks, and the first two."""
AFTER: dict[str, dict[str, list[Any]]] = {
    "layer": {
        "2-2": [[FIRST, 0], [BOTH, 0], [2, 0], [2, FIRST], [2, BOTH], [2, 2]],
        "1-2": [[FIRST, FIRST], [BOTH, BOTH], [2, 2]],
    },
    "chunk": {"2-2": [*[[0, 0]] * 3, *[[2, 0]] * 3], "1-2": [[0, 0]] * 3},
}
"""What has come after each layer of the first step: one worker of prefill's computes it after the other."""


def patched(by: str) -> dict[str, Any]:
    """With more workers of prefill's than of decode's all leaves at the end, as on stock."""
    cases = dict(STOCK)
    for shape, after in AFTER[by].items():
        end = STOCK[shape]["early"][2]
        cases[shape] = {**STOCK[shape], "early": [after, STEPS, end], "failed": WAITS, "aborted": HELD}
    return cases


def stock(release: str) -> dict[str, Any]:
    """vLLM PR#50984, in 0.30.0: what prefill answers as failed is told to decode's scheduler at once."""
    reporting = {"failed": [False, *WAITS[1:]]} if Version(release) >= Version("0.30") else {}
    return {shape: {**cases, **(reporting if "failed" in cases else {})} for shape, cases in STOCK.items()}


@pytest.mark.parametrize("release", executed.chosen(["0.33.0"], EVERY))
def test_stock(release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path) -> None:
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, path=mooncake, arguments=["0.3", *SHAPES])
    assert run["cases"] == stock(release)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("release", executed.chosen(["0.20.2", "0.33.0"], EVERY))
def test_patched(
    release: str, by: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path
) -> None:
    environ = {"LIVEPATCH_MOONCAKE_LAYERWISE": "on", "LIVEPATCH_MOONCAKE_LAYERWISE_BY": by}
    environ["LIVEPATCH_MOONCAKE_FAILED_LOADS_LOOK_SECONDS"] = "0.2"
    given = {"bundle": bundle, "path": mooncake, "arguments": ["0.3", *SHAPES], "environ": environ}
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, **given)
    assert run["cases"] == patched(by)
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    assert patch["counters"]["failed"] == 2
    assert ("layers" in patch["counters"]) == (by == "layer")
