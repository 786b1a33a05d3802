"""KV of models with windows or states beside full attention: the latter's blocks leave early, and the others at the end.

Real schedulers, workers and connectors of both sides, and Mooncake's real engine; contents are compared where decode
computes, and after each step. A patched run is with `mooncake-failed-loads` and `mooncake-lost-asks` too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from test_mooncake_layerwise import EVERY as ALL
from test_mooncake_models import BY_GROUP

PATCH = "mooncake-layerwise"
DRIVER = "mooncake_hybrids"
MODELS = ["windows", "shared", "rows", "between", "mamba", "behind"]
RELEASES = {
    "0.25.1": ["windows", "mamba"],
    "0.29.0": ["shared", "mamba"],
    "0.33.0": ["rows", "between", "mamba", "behind"],
}
"""Which models in CI."""
EVERY = [release for release in ALL if Version(release) >= BY_GROUP]
SHARING = Version("0.32.0")
"""The first release with one region of several groups."""
END = [True, 0, 0]
"""Both are idle, and all blocks have come back."""
PARTS = {"between": [1, 5, 3], "mamba": [2, 8, 1], "behind": [2, 8, 1]}
"""Layers of full attention; blocks, or states, that decode needs of the second layer and the third."""


def expected(release: str, model: str, by: str | None) -> dict[str, Any]:
    """What each case comes to. `by`: what leaves early; None: nothing, as on stock."""
    layers, second, third = PARTS.get(model, [2, 8, 3])
    states = model in ("mamba", "behind")
    whole = [239, "8 of 8", f"{second} of {second}", f"{third} of {third}"]
    short = 4 if layers == 2 else 1
    # Eight blocks of each layer of full attention, and the others', in blocks of all layers.
    brought = round((8 * layers + (second if layers == 1 else 0) + (0 if states else third)) / 3, 1)
    early = by is not None

    def came(*blocks: int) -> list[int]:
        return [number * early for number in (*blocks, *[0] * (3 - len(blocks)))]

    def step(before: int, after: int) -> list[list[int]]:
        """What has come after each layer, and after the step."""
        by_layer = by == "auto"
        first = came(after if by_layer else before, *[before] * (layers - 1))
        rest = came(*[after if by_layer else before] * layers)
        return [first, rest, rest, came(*[after] * layers)]

    regions = [-1, 0] if model == "rows" and Version(release) >= SHARING else [0, 0, 1]
    if model in ("between", "behind"):
        regions = [1, 2, 0] if model == "between" else [1, 1, 0]
    return {
        "regions": regions,
        "chunks": [[came(*[number] * layers) for number in (2, 4, 6, 7)], [whole, *END], 5.4 if states else brought],
        "by_layer": [[*step(0, 2), *step(2, 4)], [whole, *END]],
        "hits": [early, [whole, *END]],
        "same_step": [[came(*[4] * layers)] * 2, [whole, *END], whole],
        "end_of_a_block": [early, END, [127 + states, "4 of 4", f"{short} of {short}"]],
        "aborted": [early, early, early, 0],
        "preempted": [early, early, [whole, *END]],
        "preempted_later": [whole, *END],
        "drained": [early, False, [whole, *END]],
        "decode_aborted": [early, True, True, END],
        "failed": [False, early, True, 0],
    }


def models(release: str) -> list[str]:
    return MODELS if executed.by_hand() else RELEASES[release]


@pytest.mark.parametrize("release", executed.chosen(["0.25.1", "0.33.0"], EVERY))
def test_stock(release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path) -> None:
    for model in models(release)[-2:]:
        (work := tmp_path / model).mkdir()
        given = {"path": mooncake, "arguments": ["0.1", model, "chunks", "hits"]}
        run = warm.run(DRIVER, {"vllm": release}, work, **given)
        every = expected(release, model, None)
        assert run["cases"] == {name: every[name] for name in ("chunks", "hits")}, model


@pytest.mark.parametrize("release", executed.chosen([*RELEASES], EVERY))
def test_patched(
    release: str, warm: interpreter.Interpreter, mooncake: list[Path], bundle: Path, tmp_path: Path
) -> None:
    environ = {"LIVEPATCH_MOONCAKE_LAYERWISE": "on", "LIVEPATCH_MOONCAKE_FAILED_LOADS_LOOK_SECONDS": "0.2"}
    for number, model in enumerate(models(release)):
        by = "chunk" if number == 0 else "auto"
        (work := tmp_path / model).mkdir()
        given = {"bundle": bundle, "path": mooncake, "arguments": ["0.5", model]}
        run = warm.run(
            DRIVER, {"vllm": release}, work, **given, environ={**environ, "LIVEPATCH_MOONCAKE_LAYERWISE_BY": by}
        )
        patch = interpreter.reported(work, PATCH)
        assert run["cases"] == expected(release, model, by), model
        assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
        assert (patch["counters"]["failed"], patch["counters"].get("layers", 0) > 0) == (1, by == "auto")
