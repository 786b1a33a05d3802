"""KV that leaves layer by layer while a step computes the next ones: the rest is as in test_mooncake_layerwise.py.

Contents of decode's blocks are compared layer by layer, after each layer of each step, and at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
import test_mooncake_layerwise as chunk
from test_mooncake_layerwise import ALL, EVERY, FAILED, NOTHING, expected

PATCH = "mooncake-layerwise"
DRIVER = "mooncake_layers"
SHORT = ["by_layer", "amid_a_step", "rest_at_the_end", "some_layers", "aborted", "failed_and_aborted", "twice"]
"""Of the driver's cases."""
RELEASES: dict[str, list[str]] = {
    "0.20.2": SHORT,
    "0.33.0": [],
}
"""Which cases; none: all."""
NONE = [0, 0, 0, 0]
A_LAYER, THE_REST = 0.67, 7.33
"""Blocks that a write brings: one layer of two of a prompt's eight, and all but that."""

BY_CHUNK = ("order", "chunks", "amid", "computed_anew", "silent", "beside")
"""Cases of the other driver alone."""

STOCK: dict[str, Any] = {
    **{case: came for case, came in chunk.STOCK.items() if case not in BY_CHUNK},
    "by_layer": [[NONE] * 4, ALL, [8.0], 0],
    "amid_a_step": [[0, 0], ALL, 0],
    "rest_at_the_end": [NOTHING, ALL, [8.0], 0],
    "some_layers": [[NONE] * 4, ALL, [8.0], 0],
    "twice": [0, NONE, ALL, 0],
    "two_asks": [[0, 0], ALL, "loaded", 8, 0],
    "failed_later": [NOTHING, [8.0], 8, 8, True, 0],
    "anew": [ALL, [8.0], 0],
}
"""Nothing leaves before the end, and all of it then."""

PATCHED = {
    **{case: came for case, came in chunk.PATCHED.items() if case not in BY_CHUNK},
    "by_layer": [
        [
            [[2, 0, 0], [2, 2, 0], 2, 2],
            [[4, 2, 2], [4, 4, 2], 4, 4],
            [[6, 4, 4], [6, 6, 4], 6, 6],
            [[7, 6, 6], [7, 7, 6], 7, 7],
        ],
        ALL,
        [*[A_LAYER] * 9, *[0.33] * 3, 1.0],
        0,
    ],
    "amid_a_step": [[[2, 2, 0], 2], ALL, 0],
    "rest_at_the_end": [NOTHING, ALL, [A_LAYER, THE_REST], 0],
    "some_layers": [
        [
            [[2, 0, 0], [2, 0, 0], [2, 0, 0], 2],
            [2, 2, 2, 4],
            [[6, 4, 4], [6, 6, 4], 6, 6],
            [6, 6, [6, 6, 7], 7],
        ],
        ALL,
        [0.67, 1.33, 2.0, 0.67, 0.67, 0.67, 0.33, 0.67, 1.0],
        0,
    ],
    "aborted": [True, 2, NOTHING, FAILED, [2, 0, 0], 0],
    "drained": [NOTHING, ALL, [A_LAYER, THE_REST], 0],
    "failed": [NOTHING, [A_LAYER], 8, [2, 0, 0], True, 0],
    "failed_and_aborted": [NOTHING, 2, [2, 0, 0], True, 0],
    "both_given_up": [2, [NOTHING, NOTHING], [FAILED, FAILED], False, 0],
    "timed_out": [True, False, [2, 0, 0], FAILED, 0],
    "twice": [2, [2, 2, 2, 4], ALL, 0],
    "two_asks": [[2, 2], ALL, "loaded", 8, 0],
    "failed_later": [NOTHING, [A_LAYER, A_LAYER], 8, [2, 2, 0], True, 0],
    "anew": [ALL, [8.0], 0],
}


BY_CHUNK_STEPS = [
    [[0, 0, 0, 2], [2, 2, 2, 4], [4, 4, 4, 6], [6, 6, 6, 7]],
    ALL,
    [2.0, 2.0, 2.0, 1.0, 1.0],
    0,
]
"""`by_layer`, where only whole blocks leave."""


@pytest.mark.parametrize("release", executed.chosen(["0.20.2", "0.33.0"], EVERY))
def test_stock(release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path) -> None:
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, path=mooncake, arguments=["0.2", *SHORT])
    assert run["cases"] == expected(release, STOCK, SHORT)


@pytest.mark.parametrize("release", executed.chosen([*RELEASES], EVERY))
def test_patched(
    release: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path
) -> None:
    only = [] if executed.by_hand() else RELEASES[release]
    environ = {"LIVEPATCH_MOONCAKE_LAYERWISE": "on", "LIVEPATCH_MOONCAKE_LAYERWISE_BY": "auto"}
    environ["LIVEPATCH_MOONCAKE_FAILED_LOADS_LOOK_SECONDS"] = "0.2"
    given = {"bundle": bundle, "path": mooncake, "arguments": ["0.5", *only], "environ": environ}
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, **given)
    counters = chunk.expect_needed(run, tmp_path, expected(release, PATCHED, only), only)
    assert counters["layers"] > 0


def test_by_chunk(warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path) -> None:
    """The default: whole blocks, after steps."""
    environ = {"LIVEPATCH_MOONCAKE_LAYERWISE": "on"}
    given = {"bundle": bundle, "path": mooncake, "arguments": ["0.5", "by_layer"], "environ": environ}
    run = warm.run(DRIVER, {"vllm": "0.33.0"}, tmp_path, **given)
    assert run["cases"]["by_layer"] == BY_CHUNK_STEPS
