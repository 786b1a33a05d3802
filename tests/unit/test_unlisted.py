"""How what the toolkit makes of code that it does not list is counted."""

from __future__ import annotations

import pytest
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.upkeep import unlisted


def cell(verdict: str, outcome: str | None, known: str | None = "needed", changed: bool = False) -> unlisted.Cell:
    return unlisted.Cell("a", "vllm 1", known, verdict, outcome, "", changed)


@pytest.mark.parametrize(
    ("one", "column"),
    [
        (cell("needed", None), "known"),
        (cell("unverified", None), "unverified"),
        (cell("drifted", None), "gone"),
        (cell("drifted", "proven"), "proven"),
        (cell("drifted", "failed"), "refused"),
        (cell("drifted", "not-run"), "not run"),
        (cell("drifted", "no-fault", "fixed-upstream"), "no fault"),
        (cell("drifted", "proven", "fixed-upstream"), "wrong"),
        (cell("drifted", "no-fault"), "wrong"),
        (cell("drifted", "proven", None), "proven"),
        (cell("drifted", "failed", changed=True), "changed"),
        (cell("drifted", None, changed=True), "changed"),
        (cell("unverified", None, changed=True), "wrong"),
        (cell("drifted", "proven", changed=True), "wrong"),
    ],
)
def test_column(one: unlisted.Cell, column: str) -> None:
    """Code that means something else to the patch, or needs it no more, must not be patched as if it did."""
    assert one.column == column


def test_changed_in_meaning() -> None:
    """What a patch must know of vLLM 0.30.0 it knew of no release before; of 0.33.0, where it is the same again, too."""
    entry = catalogue.load()["moriio-preemption"]
    past = unlisted.until(entry, "0.29.0").patch
    assert unlisted._changed(entry.patch, past, "0.30.0")
    assert unlisted._changed(entry.patch, past, "0.33.0")
    assert not unlisted._changed(entry.patch, unlisted.until(entry, "0.32.0").patch, "0.33.0")
    assert not unlisted._changed(entry.patch, past, "0.28.0")


def test_table() -> None:
    """Cells of patches that the release does not need are left out, unless something is wrong with them."""
    found = [
        cell("drifted", "proven"),
        cell("needed", None, "fixed-upstream"),
        cell("drifted", "proven", "fixed-upstream"),
    ]
    assert unlisted.table(found).splitlines()[2:] == ["| vllm 1 | 2 |  |  | 1 |  |  |  |  |  | 1 |"]
