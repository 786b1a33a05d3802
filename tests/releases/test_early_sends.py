"""Every pinned vLLM's real MultiConnector: a child's send ends before the worker knows how many children send.

What is passed on as sent (S) frees the request's blocks. It must not be before the last of the children that announced
a send has said that it has ended.
"""

from __future__ import annotations

from pathlib import Path

import executed
import interpreter
import pytest
from vllm_livepatch.tools.releases import registry

DRIVER = "early_sends"
PATCH = "stale-finished-recving"
SOME = executed.ends([pin.version for pin in registry.pins("vllm")])

# By case: what is passed on step by step, on stock and patched. The step that tells of the request's end is the second
# (the third where two were scheduled before it).
CASES = {
    "first_is_early": (["S", "", ""], ["", "", "S"]),
    "second_is_early": (["S", "", ""], ["", "", "S"]),
    "other_with_the_news": (["S", "", ""], ["", "S", ""]),
    "both_early_at_once": (["S", "", ""], ["", "S", ""]),
    "both_early_one_after_the_other": (["S", "S", "", ""], ["", "", "S", ""]),
    "one_announces": (["S", "", ""], ["", "S", ""]),
    "three": (["S", "", "", ""], ["", "", "", "S"]),
    "nested": (["S", "", "", ""], ["", "", "", "S"]),
    "receive_does_not_wait": (["SR", "", ""], ["R", "", "S"]),
    "none_is_early": (["", "", "", "S"], ["", "", "", "S"]),
}
STOCK = {name: stock for name, (stock, _) in CASES.items()}
PATCHED = {name: patched for name, (_, patched) in CASES.items()}
EARLY = 11
"""How many sends come early in all of the cases."""


@pytest.mark.parametrize("release", SOME)
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """A send that comes early is passed on at once, while others still read."""
    cases = warm.run(DRIVER, {"vllm": release}, tmp_path)["cases"]
    assert {name: case["reports"] for name, case in cases.items()} == STOCK
    assert all(case["announced"] for case in cases.values())


@pytest.mark.parametrize("release", SOME)
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """It is passed on once, with the last, and no count is left behind."""
    cases = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle)["cases"]
    assert {name: case["reports"] for name, case in cases.items()} == PATCHED
    assert [name for name, case in cases.items() if case["left"]] == []
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    assert patch["counters"] == {"send_early": EARLY}
