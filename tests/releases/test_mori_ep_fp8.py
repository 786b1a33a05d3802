# mypy: disable-error-code="import-not-found"
"""Expert parallelism over MoRI with FP8, on every release: those that need `mori-ep-fp8`, that are fixed, and that lack it.

vLLM's own classes, on a CPU. mori and AITER are stand-ins, which quantise for real; their kernels are not shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from vllm_livepatch.sitecustomize import decision, installed
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.releases import registry, sources

PATCH = "mori-ep-fp8"
RELEASES = [pin.version for pin in registry.pins("vllm")]
NEEDED = ["0.16.0", "0.17.0", "0.17.1", "0.18.1"]
FIXED = executed.chosen(["0.19.1", "0.33.0"], RELEASES[RELEASES.index("0.19.1") :])
"""In CI one of each form: MoRI under two names from 0.23.0, the layer a function from 0.24.0, experts by scheme in 0.33.0."""
BEFORE = executed.chosen(["0.15.1"], ["0.15.1"])
WITHOUT_MORI = executed.chosen(["0.14.1"], ["0.14.1"])
SWITCH = {"LIVEPATCH_MORI_EP_FP8": "on"}
ALLOW = {**SWITCH, "LIVEPATCH_MORI_EP_FP8_ALLOW_WITHOUT_AITER": "1"}
REFUSED_LAYER = "AssertionError in __init__: Mori needs to be used with aiter fused_moe for now."

BFLOAT16, FP8 = "torch.bfloat16", "torch.float8_e4m3fn"


@dataclass(frozen=True)
class Way:
    """How the tokens of one scheme of weights get to AITER's experts."""

    quantised: list[str]
    """What is quantised on the way or by AITER, by the type that it had: what has been quantised is FP8."""
    given: list[str]
    """What AITER's experts are given."""
    scales: int
    """Of each token, that travel with it."""


WAYS = {
    "none": Way([], [BFLOAT16], 0),
    "tensor": Way([BFLOAT16], [BFLOAT16], 0),
    "token": Way([BFLOAT16], [FP8], 1),
    "block": Way([BFLOAT16], [FP8], 2),
}
TENSOR_QUANTISED_BEFORE = Way([BFLOAT16], [FP8], 1)
"""From 0.31.0 on MoRI quantises for the way per tensor, too."""

FP8_DISTANCE = 0.06
"""Of a right result, relative to that with unquantised activations: FP8 has 3 bits of mantissa."""
ONE_ROUNDING = 1
"""To FP8: how far each value that AITER computes on may be from the token's (see the driver's `away_by`)."""


def before(release: str, other: str) -> bool:
    return RELEASES.index(release) < RELEASES.index(other)


def drive(
    warm: interpreter.Interpreter, release: str, work: Path, bundle: Path | None, variables: dict[str, str]
) -> dict[str, Any]:
    """What driver/mori_ep_fp8.py printed of a release."""
    given = {"vllm": release}
    path = [interpreter.STANDINS]
    result: dict[str, Any] = warm.run("mori_ep_fp8", given, work, bundle=bundle, environ=variables, path=path)
    return result


def runs_and_quantises_once(result: dict[str, Any], release: str) -> None:
    """Every scheme runs, every value is rounded to FP8 once at most, and the result is right."""
    ways = WAYS if before(release, "0.31.0") else {**WAYS, "tensor": TENSOR_QUANTISED_BEFORE}
    runs = {**result["schemes"], **{f"block over {name}": run for name, run in result["other_backends"].items()}}
    assert len(runs) == (4 if before(release, "0.23.0") else 5)
    for name, run in runs.items():
        way = ways[name.partition(" ")[0]]
        assert run["outcome"] == "runs", name
        assert (run["quantised"], run["given"]) == (way.quantised, way.given), name
        assert run["away"] <= (ONE_ROUNDING if way.quantised else 0), name
        assert run["distance"] < FP8_DISTANCE, name
        # To 0.19.1 FP8 and scales are announced to MoRI also where it gets neither.
        as_sent = run["announced"] == [way.given[0], way.scales]
        assert as_sent is (way.scales > 0 or not before(release, "0.20.2")), name
    assert result["elsewhere"], "AITER's experts must go on asking where MoRI is not used"


def would_show(result: dict[str, Any]) -> None:
    """What is quantised twice is seen as such: as if it were not quantised yet, or once more by another scale."""
    spoilt = result["spoilt"]
    assert {name: run["quantised"] for name, run in spoilt.items()} == {
        "as_if_unquantised": [BFLOAT16, FP8],
        "again": [BFLOAT16, "torch.float32"],
    }
    for name, run in spoilt.items():
        assert run["away"] > ONE_ROUNDING, name


def asked(result: dict[str, Any]) -> set[bool]:
    """Whether AITER's experts ask for unquantised inputs under MoRI, whatever the scheme."""
    return {run["asks_for_unquantised"] for run in (*result["schemes"].values(), *result["other_backends"].values())}


@pytest.mark.parametrize("release", executed.first(NEEDED))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Whatever the scheme, `prepare` refuses what the experts ask for."""
    result = drive(warm, release, tmp_path, None, {})
    for scheme, run in result["schemes"].items():
        refused = {"outcome": "NotImplementedError in prepare", "asks_for_unquantised": True}
        assert run == refused, scheme
    assert result["elsewhere"]
    assert result["layer"] == REFUSED_LAYER


@pytest.mark.parametrize("release", executed.first(NEEDED))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Each scheme runs; the layer still asserts that AITER is on."""
    result = drive(warm, release, tmp_path, bundle, SWITCH)
    runs_and_quantises_once(result, release)
    would_show(result)
    assert asked(result) == {False}
    assert result["layer"] == REFUSED_LAYER
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["counters"]) == ("applied", "needed", {}), patch


@pytest.mark.parametrize("release", executed.first(["0.16.0", "0.17.0", "0.18.1"]))
def test_without_aiter(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Only where it is asked for is a layer built without AITER, and it is counted. One of each variant."""
    result = drive(warm, release, tmp_path, bundle, ALLOW)
    runs_and_quantises_once(result, release)
    assert result["layer"] == "built over MoRI"
    assert interpreter.reported(tmp_path, PATCH)["counters"] == {"built_without_aiter": 1}


@pytest.mark.parametrize("release", FIXED)
def test_fixed_release(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Releases with the fix, some in CI and all by hand, do by themselves what the patch makes of the earlier ones."""
    result = drive(warm, release, tmp_path, None, {})
    runs_and_quantises_once(result, release)
    would_show(result)
    assert asked(result) == {False}
    assert result["prepare_can_defer"]
    # From 0.24.0 on the layer's configuration asserts that AITER is on.
    assert result["layer"] == REFUSED_LAYER.replace(
        "__init__", "__init__" if before(release, "0.24.0") else "__post_init__"
    )


@pytest.mark.parametrize("release", BEFORE)
def test_before_prepare_could_refuse(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """AITER's experts ask already, but nobody can pass that on to MoRI's `prepare`: it quantises, and nothing else does."""
    result = drive(warm, release, tmp_path, None, {})
    assert asked(result) == {True}
    assert not result["prepare_can_defer"]
    runs_and_quantises_once(result, release)
    would_show(result)
    assert result["layer"] == REFUSED_LAYER


@pytest.mark.parametrize("release", WITHOUT_MORI)
def test_without_mori(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """No expert parallelism over MoRI: not among the backends, no `prepare`, and nothing that asks for it."""
    lacking = drive(warm, release, tmp_path, None, {})["lacking"]
    assert lacking.pop("backend").startswith(
        "ValidationError: 1 validation error for ParallelConfig\nall2all_backend\n"
    )
    assert lacking == {"prepare": False, "experts_ask": False, "layer_asks": False}


@pytest.mark.parametrize("release", RELEASES)
def test_verdict(release: str) -> None:
    """It is needed on these releases only, was not there before, and `auto` applies it on ROCm only."""
    patch = catalogue.load()[PATCH].patch
    found = installed.look(patch, installed.Tree([str(sources.site_packages("vllm", release))]))
    needed = release in NEEDED
    for toggle, rocm in (("auto", True), ("auto", False), ("on", False)):
        asked = decision.Environment(toggles={PATCH: toggle})
        there = decision.Installed(found.release, found.code, rocm)
        decided = decision.decide(patch, there, asked)
        assert (decided.verdict == "needed") is needed
        if not needed:
            assert decided.verdict == ("not-present" if release in ("0.14.1", "0.15.1") else "fixed-upstream")
        assert decided.apply is (needed and (rocm or toggle == "on"))
