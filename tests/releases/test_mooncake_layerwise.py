"""KV that leaves while the rest of the prompt is computed: a release's real scheduler and worker, Mooncake's real engine.

Contents of decode's blocks are compared after each step, and at the end. A patched run is with `mooncake-failed-loads`
and `mooncake-lost-asks` too: they wrap the same class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools import environments

DRIVER = "mooncake_layerwise"
RELEASES = ["0.20.2", "0.21.0", "0.24.0", "0.25.1", "0.30.0", "0.32.0", "0.33.0"]
"""The first of each form of the connector's code. All from 0.20.2 on were run by hand."""
STOCKS = ["0.29.0", "0.32.0"]
NOTHING, FAILED, ALL = "nothing is told", "failed", ["loaded", 8]

STOCK: dict[str, Any] = {
    "chunks": [[0, 0, 0, 0], ALL, [8.0], 0],
    "late": [ALL, [8.0], 0],
    "amid": [False, ALL, 8.0, 8.0, 0],
    "hits": [[0, 0], [["loaded", 5], ["loaded", 6], ALL], 0],
    "same_step": [[0, 0], ALL, ALL, 0],
    "aborted": [False, False, NOTHING, NOTHING, True, ALL, 0],
    "preempted": [False, False, ALL, [8.0], 0],
    "computed_anew": ["loaded", True, [8.0], 0],
    "drained": [NOTHING, ALL, [8.0], 0],
    "many": [[ALL] * 7, 0],
    "more": [[NOTHING, True], *ALL],
    "failed": [NOTHING, [8.0]],
    "failed_and_aborted": NOTHING,
    "forgotten": 0,
}
"""Nothing leaves before the end, and all of it then."""

PATCHED = {
    **STOCK,
    "chunks": [[2, 4, 6, 7], ALL, [2.0, 2.0, 2.0, 1.0, 1.0], 0],
    "amid": [True, ALL, 4.0, 8.0, 0],
    "hits": [[4, 7], [["loaded", 5], ["loaded", 6], ALL], 0],
    "same_step": [[2, 4], ALL, ALL, 0],
    "aborted": [True, True, NOTHING, FAILED, True, ALL, 0],
    "preempted": [True, True, ALL, [8.0], 0],
    "drained": [NOTHING, ALL, [2.0, 6.0], 0],
    "more": [[FAILED, True], *ALL],
    "failed": [NOTHING, [2.0]],
}
"""The aborted and the refused are told by `mooncake-lost-asks` and `mooncake-failed-loads`."""


@pytest.fixture(scope="module")
def mooncake(engine_python: Path) -> list[Path]:
    """Mooncake's real transfer engine. It links libraries of Debian's, which are fetched as packages."""
    try:
        return [environments.mooncake(engine_python)]
    except environments.InstallationError as error:
        pytest.skip(f"Mooncake's engine cannot be had here: {error}")


def reported(release: str, cases: dict[str, Any]) -> dict[str, Any]:
    """vLLM PR#50984, in 0.30.0: what prefill answers as failed is told to decode's scheduler at once."""
    if Version(release) < Version("0.30"):
        return cases
    given_up = NOTHING if cases is STOCK else FAILED
    told = {"failed": [FAILED, *cases["failed"][1:]], "failed_and_aborted": given_up}
    return {**cases, **told, "more": [[FAILED, True], *ALL]}


@pytest.mark.parametrize("release", STOCKS)
def test_stock(release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path) -> None:
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, path=mooncake, arguments=["0.3"])
    assert run["cases"] == reported(release, STOCK)


@pytest.mark.parametrize("release", RELEASES)
def test_patched(
    release: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path
) -> None:
    environ = {"LIVEPATCH_MOONCAKE_LAYERWISE": "on", "LIVEPATCH_MOONCAKE_FAILED_LOADS_LOOK_SECONDS": "0.2"}
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle, path=mooncake, arguments=["1"], environ=environ)
    assert run["cases"] == reported(release, PATCHED)
    patch = interpreter.reported(tmp_path, "mooncake-layerwise")
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    assert patch["counters"]["failed"] == 2
