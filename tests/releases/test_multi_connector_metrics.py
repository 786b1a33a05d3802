"""A MultiConnector's metrics with Mooncake's connector as a child, of each release that has the fault, stock and patched.

One release of each form of the code is run, the one that has it mended, and one before; the others by hand.
"""

from __future__ import annotations

from pathlib import Path

import executed
import interpreter
import pytest
from vllm_livepatch.tools.bundles import catalogue

PATCH = "multi-connector-metrics"
DRIVER = PATCH.replace("-", "_")
VARIANTS = catalogue.load()[PATCH].patch.variants


def releases(verdict: str) -> list[str]:
    """The first of each form of that verdict, or by hand what is asked for."""
    forms = [variant.releases for variant in VARIANTS if variant.verdict == verdict]
    found: list[str] = executed.chosen([form[0] for form in forms], [release for form in forms for release in form])
    return found


NEEDED, FIXED, WITHOUT = releases("needed"), releases("fixed-upstream"), releases("not-present")
SHOWN = {"before": 1.0, "after": 2.0, "raised": None, "logged": True}


def outcome(run: dict[str, object]) -> dict[str, object]:
    return {name: run[name] for name in SHOWN}


@pytest.mark.parametrize("release", NEEDED)
def test_stock_asserts_and_shows_nothing(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    run = warm.run(DRIVER, {"vllm": release}, tmp_path)
    assert outcome(run) == {**SHOWN, "after": 1.0, "raised": "MooncakeConnector is not"}


@pytest.mark.parametrize("release", WITHOUT)
def test_before_the_fault(release: str, warm: interpreter.Interpreter, mooncake: list[Path], tmp_path: Path) -> None:
    """To 0.20.2 Mooncake's connector tells nothing, so that nothing of it is asserted, and NIXL's is shown.

    To 0.18.1 it cannot be imported without Mooncake.
    """
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, path=mooncake)
    assert run["tell"] == ["NixlConnector"]
    assert outcome(run) == {**SHOWN, "logged": False}, "Mooncake's is not logged either"


@pytest.mark.parametrize("release", FIXED)
def test_stock_that_is_mended_shows_what_it_can(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    assert outcome(warm.run(DRIVER, {"vllm": release}, tmp_path)) == SHOWN


@pytest.mark.parametrize("release", NEEDED)
def test_patched_shows_what_it_can(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle)
    assert outcome(run) == SHOWN
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["counters"]) == ("applied", "needed", {"left_out": 1})
