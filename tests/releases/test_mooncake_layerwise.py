"""KV that leaves while the rest of the prompt is computed: a release's real scheduler and worker, Mooncake's real engine.

Contents of decode's blocks are compared after each step, and at the end. A patched run is with `mooncake-failed-loads`
and `mooncake-lost-asks` too: they wrap the same class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version

PATCH = "mooncake-layerwise"
DRIVER = "mooncake_layerwise"
SHORT = ["order", "chunks", "aborted", "failed_and_aborted", "decode_aborted"]
"""Of the driver's cases."""
EVERY = [
    *("0.20.2", "0.21.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0"),
    *("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
]
NOTHING, FAILED, ALL = "nothing is told", "failed", ["loaded", 8]

STOCK: dict[str, Any] = {
    "order": [],
    "chunks": [[0, 0, 0, 0], ALL, [8.0], 0],
    "late": [ALL, [8.0], 0],
    "amid": [False, ALL, 8.0, 8.0, 0],
    "hits": [[0, 0], [["loaded", 5], ["loaded", 6], ALL], 0],
    "same_step": [[0, 0], ALL, ALL, 0],
    "aborted": [False, 0, NOTHING, NOTHING, 0, 0],
    "begun_again": [False, False, 0, NOTHING, ALL, 0],
    "preempted": [False, False, ALL, [8.0], 0],
    "computed_anew": ["loaded", True, [8.0], 0],
    "drained": [NOTHING, ALL, [8.0], 0],
    "many": [[ALL] * 7, 0],
    "more": [[NOTHING, True], *ALL],
    "failed": [NOTHING, [8.0], 8, 8, True, 0],
    "failed_and_aborted": [NOTHING, 0, 0, False, 0],
    "failed_and_let_go": [True, False, False, 0],
    "failed_and_again": ["loaded", 8, 0],
    "decode_aborted": [False, 8, True, True, 6, 0, 0],
    "stuck": [False, True, ALL, [8.0], 0],
    "stuck_again": [False, True, ALL, 0, 0],
    "asked_first": [False, "loaded", [NOTHING, NOTHING], NOTHING, 0],
    "again_and_again": [False, [0, 0], 0],
    "asleep": [False, False, False, [ALL, ALL], 0],
    "silent": [True, ALL, True, 0],
    "beside": [True, NOTHING, 0],
    "forgotten": 0,
}
"""Nothing leaves before the end, and all of it then."""

PATCHED = {
    **STOCK,
    "order": ["mooncake_lost_asks", "mooncake_layerwise"],
    "chunks": [[2, 4, 6, 7], ALL, [2.0, 2.0, 2.0, 1.0, 1.0], 0],
    "amid": [True, ALL, 4.0, 8.0, 0],
    "hits": [[4, 7], [["loaded", 5], ["loaded", 6], ALL], 0],
    "same_step": [[2, 4], ALL, ALL, 0],
    "aborted": [True, 2, NOTHING, FAILED, 2, 0],
    "begun_again": [True, False, 2, FAILED, ALL, 0],
    "preempted": [True, True, ALL, [8.0], 0],
    "drained": [NOTHING, ALL, [2.0, 6.0], 0],
    "more": [[FAILED, True], *ALL],
    "failed": [NOTHING, [2.0], 8, 2, True, 0],
    "failed_and_aborted": [NOTHING, 2, 2, True, 0],
    "failed_and_let_go": [False, True, True, 0],
    "decode_aborted": [True, 8, True, True, 6, 0, 0],
    "stuck": [True, True, ALL, [8.0], 0],
    "stuck_again": [True, True, ALL, 2, 0],
    "asked_first": [True, FAILED, [NOTHING, FAILED], "loaded", 0],
    "again_and_again": [True, [2, 2], 0],
    "asleep": [True, True, False, [ALL, ALL], 0],
    "both_given_up": [2, [NOTHING, NOTHING], [FAILED, FAILED], False, 0],
    "timed_out": [True, False, 2, FAILED, 0],
    "beside": [True, "loaded", 0],
}
"""The aborted and the refused are told by `mooncake-lost-asks` and `mooncake-failed-loads`."""


def expected(release: str, cases: dict[str, Any], only: list[str]) -> dict[str, Any]:
    """vLLM PR#50984, in 0.30.0: what prefill answers as failed is told to decode's scheduler at once."""
    if Version(release) >= Version("0.30"):
        cases = {**cases, "more": [[FAILED, True], *ALL]}
        if cases["drained"] == STOCK["drained"]:
            for name in {"failed", "failed_later"} & {*cases}:
                cases[name] = [FAILED, *cases[name][1:]]
    if "asleep" in cases and Version(release) < Version("0.33"):
        cases = {**cases, "asleep": None}
    return {name: came for name, came in cases.items() if not only or name in only}


def expect_needed(run: dict[str, Any], work: Path, cases: dict[str, Any], only: list[str]) -> dict[str, Any]:
    """Expect of a run in `work` that its cases came to these, by a patch that is needed. Return what it counted."""
    patch = interpreter.reported(work, PATCH)
    assert run["cases"] == cases
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    assert patch["counters"]["failed"] == (1 if only else 5)
    return dict(patch["counters"])


@pytest.mark.parametrize("release", executed.ends(EVERY))
def test_stock(release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path) -> None:
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, path=mooncake, arguments=["0.2", *SHORT])
    assert run["cases"] == expected(release, STOCK, SHORT)


@pytest.mark.parametrize("release", executed.ends(EVERY))
def test_patched(
    release: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path
) -> None:
    environ = {"LIVEPATCH_MOONCAKE_LAYERWISE": "on", "LIVEPATCH_MOONCAKE_FAILED_LOADS_LOOK_SECONDS": "0.2"}
    given = {"bundle": bundle, "path": mooncake, "arguments": ["0.5"], "environ": environ}
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, **given)
    expect_needed(run, tmp_path, expected(release, PATCHED, []), [])
