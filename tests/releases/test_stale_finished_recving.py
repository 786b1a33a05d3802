"""Every pinned vLLM release, stock and patched, through stale completion notifications.

Each test is an interpreter of its own with the release's sources on PYTHONPATH, behind the bundle or not. A release
that cannot be driven fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from vllm_livepatch.tools.releases import registry
from vllm_livepatch.tools.toml import tomllib

HERE = Path(__file__).parent
PATCH = "stale-finished-recving"
DRIVER = PATCH.replace("-", "_")

RELEASES = [pin.version for pin in registry.pins("vllm")]


@dataclass(frozen=True)
class Expectation:
    """What a release's cases come to: by case, the outcome on stock and what the patch counts."""

    stock: dict[str, str]
    counted: dict[str, list[str]]
    counts_fetches: bool


def expectation(release: str) -> Expectation:
    """Return what is expected of a release; fails the test where nobody wrote that down."""
    groups = tomllib.loads((HERE / "expectations.toml").read_text(encoding="utf-8"))["group"]
    for group in groups:
        if release in group["releases"]:
            cases = group["cases"]
            return Expectation(
                stock={name: case.get("stock_in", {}).get(release, case["stock"]) for name, case in cases.items()},
                counted={name: case["counted"] for name, case in cases.items()},
                counts_fetches=release in group["counts_fetches"],
            )
    pytest.fail(f"expectations.toml says nothing of vLLM {release}")


def outcomes(result: dict[str, Any], scheduler: str) -> dict[str, str]:
    """Return what each case came to on one of the scheduler classes."""
    return {name: case["outcome"] for name, case in result["cases"][scheduler].items()}


@pytest.mark.parametrize("release", executed.ends(RELEASES))
def test_stock(
    release: str, warm: interpreter.Interpreter, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Each fault shows on the unpatched release, in the place that reading it told."""
    expected = expectation(release)
    result = warm.run(DRIVER, {"vllm": release}, tmp_path)
    record_property("outcomes", [release, "stock", list(outcomes(result, "Scheduler").values())])
    assert result["counts_fetches"] == expected.counts_fetches
    for scheduler in result["cases"]:
        assert outcomes(result, scheduler) == expected.stock, scheduler


@pytest.mark.parametrize("release", executed.ends(RELEASES))
def test_patched(
    release: str,
    warm: interpreter.Interpreter,
    bundle: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """No fault is left on the patched release, the connector hears of everything, and what the patch does is counted."""
    expected = expectation(release)
    result = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle)
    record_property("outcomes", [release, "patched", list(outcomes(result, "Scheduler").values())])
    for scheduler, cases in result["cases"].items():
        assert outcomes(result, scheduler) == dict.fromkeys(expected.stock, "survives"), scheduler
        assert [name for name, case in cases.items() if not case["connector_saw_all"]] == [], scheduler

    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    counted = Counter(kind for kinds in expected.counted.values() for kind in kinds)
    assert patch["counters"] == {kind: count * len(result["cases"]) for kind, count in counted.items()}
