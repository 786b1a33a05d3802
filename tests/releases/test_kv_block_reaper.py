"""Every pinned vLLM release, stock and patched, through lost completions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

PATCH = "kv-block-reaper"
DRIVER = "kv_block_reaper"
RELEASES = [pin.version for pin in registry.pins("vllm")]
MORIIO_TO, NIXL_FROM, NIXL_TO = Version("0.22.1"), Version("0.22.1"), Version("0.30.0")
ON = {"LIVEPATCH_KV_BLOCK_REAPER": "on"}
AGE = {"LIVEPATCH_KV_BLOCK_REAPER_IDLE_SECONDS": "100"}
ALONE = {"LIVEPATCH_STALE_FINISHED_RECVING": "off"}

FOR_EVER = ["held for ever", "pool not full"]
STOCK = {
    "by_age": FOR_EVER,
    "under_load": FOR_EVER,
    "own_way": ["not freed by the scheduler's own way", *FOR_EVER],
    "in_flight": FOR_EVER,
    "receive_pending": [],
    # There is no reap for it to be later than: the first frees the request, the second finds none.
    "late_completion": ["AssertionError in _update_from_kv_xfer_finished"],
    "new_request_finds_blocks": ["new requests wait", *FOR_EVER],
}
"""What each case comes to without the patch, on every release."""

COUNTED = {"watching": 9, "receive_pending": 1, "late": 3}
"""What the patch counts in one scheduler class's cases: one watch a case. How many requests use up the pool, and are
reaped with it, differs between releases."""
REAPED_AT_LEAST = 20


def connectors(release: str) -> list[str]:
    """The connectors that the patch looks after by itself."""
    version = Version(release)
    return ["NixlDouble"] * (NIXL_FROM <= version <= NIXL_TO)


def ages(release: str) -> dict[str, float]:
    """How long a hold may last where nobody says, by the release's own connectors: above their own timeouts."""
    version = Version(release)
    return {
        "MooncakeConnector": 480 * 1.25 + 10,
        "NixlConnector": 480 * 1.25 + 10 if version < NIXL_FROM else 3600,
        "MoRIIOConnector": 600 if version <= MORIIO_TO else 60 * 1.25 + 10,
    }


def all_well(cases: dict[str, dict[str, list[str]]]) -> dict[str, dict[str, list[str]]]:
    return {scheduler: {case: [] for case in outcomes} for scheduler, outcomes in cases.items()}


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock_never_gives_them_back(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """With a connector that never says that a send has ended, on releases too whose own connectors have a timeout."""
    result = warm.run(DRIVER, {"vllm": release}, tmp_path, arguments=["MoRIIODouble"])
    expected = {**STOCK, "sleeps_again": ["steps for ever"] if Version(release) >= Version("0.22.1") else []}
    for scheduler, outcomes in result["cases"].items():
        del outcomes["same_id_again"]  # nothing to be told apart: the id was never given up
        assert outcomes == expected, scheduler


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """By itself where the release needs it, asked for where not; without the patch that takes late completions."""
    needed = connectors(release)
    environ = {**ALONE, **AGE, **({} if needed else ON)}
    connector = needed[-1] if needed else "LMCacheDouble"
    result = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle, environ=environ, arguments=[connector])
    assert result["cases"] == all_well(result["cases"])
    assert result["ages"] == ages(release)
    patch = interpreter.reported(tmp_path, PATCH)
    verdict = "needed" if Version(release) <= NIXL_TO else "fixed-upstream"
    assert (patch["state"], patch["verdict"]) == ("applied", verdict), patch
    classes = len(result["cases"])
    assert patch["counters"].pop("reaped") >= REAPED_AT_LEAST * classes
    counted = Counter({kind: number * classes for kind, number in COUNTED.items()})
    # The ages are those of three schedulers more, each of which was made with a connector of the release's own.
    watched = len(needed) or 3
    assert patch["counters"] == counted + Counter(watching=watched, not_needed=3 - watched)


# The first and last forms of the code, and the last release to need both.
SOME = ["0.14.1", "0.22.1", "0.33.0"]


@pytest.mark.parametrize("release", executed.chosen(SOME[1:], SOME))
def test_beside_the_patch_of_the_same_method(
    release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    environ = {**AGE, **ON}
    result = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle, environ=environ, arguments=["NixlDouble"])
    assert result["cases"] == all_well(result["cases"])
    classes = len(result["cases"])
    counters = interpreter.reported(tmp_path, "stale-finished-recving")["counters"]
    # It keeps account of what was reaped: of a later request with the id, of an unknown one, of one that still receives.
    dropped = {"send_late": 2, "send_unknown": 1, "held_for_send": 1}
    assert counters == {kind: number * classes for kind, number in dropped.items()}
    assert "late" not in interpreter.reported(tmp_path, PATCH)["counters"]


@pytest.mark.parametrize("release", executed.first(SOME))
def test_not_needed_does_nothing(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Under `auto`, with a connector that is not known to lose completions, all is as on stock."""
    arguments = ["LMCacheDouble"]
    environ = {**ALONE, **AGE}
    result = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle, environ=environ, arguments=arguments)
    for outcomes in result["cases"].values():
        assert {name: outcomes[name] for name in STOCK} == STOCK
    patch: dict[str, Any] = interpreter.reported(tmp_path, PATCH)
    assert patch["counters"].get("reaped", 0) == 0
