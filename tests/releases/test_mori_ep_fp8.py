# mypy: disable-error-code="import-not-found"
"""Expert parallelism over MoRI with FP8, on every release that needs `mori-ep-fp8`: vLLM's own classes, on a CPU.

mori and AITER are stand-ins, which quantise for real; their kernels are not shown.
"""

from __future__ import annotations

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
FIXED = executed.chosen(["0.19.1"], RELEASES[RELEASES.index("0.19.1") : RELEASES.index("0.23.0")])
"""Later releases build their layer in another module, and ask more of AITER than the stand-in has: read, not run."""
SWITCH = {"LIVEPATCH_MORI_EP_FP8": "on"}
ALLOW = {**SWITCH, "LIVEPATCH_MORI_EP_FP8_ALLOW_WITHOUT_AITER": "1"}
REFUSED_LAYER = "AssertionError in __init__: Mori needs to be used with aiter fused_moe for now."

# By scheme of the weights: what was quantised, by the type that it had, and what AITER's experts were given.
ONCE = {
    "none": ([], ["torch.bfloat16"]),
    "tensor": (["torch.bfloat16"], ["torch.bfloat16"]),
    "token": (["torch.bfloat16"], ["torch.float8_e4m3fn"]),
    "block": (["torch.bfloat16"], ["torch.float8_e4m3fn"]),
}
FP8_DISTANCE = 0.06
"""Of a right result, relative to that with unquantised activations: FP8 has 3 bits of mantissa."""


def drive(
    warm: interpreter.Interpreter, release: str, work: Path, bundle: Path | None, variables: dict[str, str]
) -> dict[str, Any]:
    """What driver/mori_ep_fp8.py printed of a release."""
    given = {"vllm": release}
    path = [interpreter.STANDINS]
    result: dict[str, Any] = warm.run("mori_ep_fp8", given, work, bundle=bundle, environ=variables, path=path)
    return result


def runs_and_quantises_once(result: dict[str, Any]) -> None:
    """Every scheme runs, nothing is quantised twice, and the result is right."""
    for scheme, run in result["schemes"].items():
        assert (run["outcome"], run["asks_for_unquantised"]) == ("runs", False), scheme
        assert (run["quantised"], run["given"]) == ONCE[scheme], scheme
        assert run["distance"] < FP8_DISTANCE, scheme
    assert result["elsewhere"], "AITER's experts must go on asking where MoRI is not used"


@pytest.mark.parametrize("release", NEEDED)
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Whatever the scheme, `prepare` refuses what the experts ask for."""
    result = drive(warm, release, tmp_path, None, {})
    for scheme, run in result["schemes"].items():
        refused = {"outcome": "NotImplementedError in prepare", "asks_for_unquantised": True}
        assert run == refused, scheme
    assert result["elsewhere"]
    assert result["layer"] == REFUSED_LAYER


@pytest.mark.parametrize("release", NEEDED)
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Each scheme runs; the layer still asserts that AITER is on."""
    result = drive(warm, release, tmp_path, bundle, SWITCH)
    runs_and_quantises_once(result)
    assert result["layer"] == REFUSED_LAYER
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["counters"]) == ("applied", "needed", {}), patch


@pytest.mark.parametrize("release", ["0.16.0", "0.17.0", "0.18.1"])
def test_without_aiter(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Only where it is asked for is a layer built without AITER, and it is counted. One of each variant."""
    result = drive(warm, release, tmp_path, bundle, ALLOW)
    runs_and_quantises_once(result)
    assert result["layer"] == "built over MoRI"
    assert interpreter.reported(tmp_path, PATCH)["counters"] == {"built_without_aiter": 1}


@pytest.mark.parametrize("release", FIXED)
def test_fixed_release(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """The first release with the fix, and by hand the others, does by itself what the patch makes of the earlier ones."""
    result = drive(warm, release, tmp_path, None, {})
    runs_and_quantises_once(result)
    assert result["layer"] == REFUSED_LAYER


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
