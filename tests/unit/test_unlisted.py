"""How what the toolkit makes of code that it does not list is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.commands import matrix
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
        (cell("unverified", None, "fixed-upstream"), "wrong"),
        (cell("drifted", "proven", "not-present"), "wrong"),
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


def test_silent() -> None:
    """A patch that the tree needs, and that a process leaves out without a word."""
    assert cell("not-present", None).column == "silent"
    assert cell("fixed-upstream", None).column == "silent"
    assert not cell("not-present", None, None).counts
    assert cell("drifted", "failed", None).counts


def test_known() -> None:
    """Of a build between two releases it is known what both have in common."""
    patch = catalogue.load()["kv-block-reaper"].patch
    assert unlisted.known(patch, "vllm 0.30.0") == "needed"
    assert unlisted.known(patch, "vllm 0.29.1.dev20260901+gabc") == "needed"
    assert unlisted.known(patch, "vllm 0.30.1.dev20260901") is None
    assert unlisted.known(patch, "vllm 0.31.1rc1") == "fixed-upstream"
    assert unlisted.known(patch, "vllm 0.34.0") is None
    assert unlisted.known(patch, "vllm 0.33.0, edited") is None


def test_row() -> None:
    """Cells of patches that the release does not need are left out, unless something is wrong with them."""
    found = [
        cell("drifted", "proven"),
        cell("needed", None, "fixed-upstream"),
        cell("drifted", "failed"),
        cell("drifted", "proven", "fixed-upstream"),
    ]
    cells = {"proven": 1, "refused": 1, "wrong": 1}
    assert unlisted.row(found) == {"cells": cells, "refused": ["a"], "wrong": ["a"]}


def test_a_tree_is_kept_beside_the_others(tmp_path: Path) -> None:
    """One release after the other, at another time or on another machine; a release that is played again is kept anew."""
    place = tmp_path / "unlisted.json"
    trees = ("vllm 0.27.2.dev1", "lmcache 0.5.6", "vllm 0.33.0", "vllm 0.30.0")
    for tree in trees:
        unlisted.keep(tree, [cell("drifted", "failed")], 0.6, place)
    unlisted.keep("vllm 0.33.0", [cell("drifted", "proven")] * 2, 0.6, place)
    kept = unlisted.read(place)
    assert list(kept) == ["vllm 0.30.0", "vllm 0.33.0", "lmcache 0.5.6", "vllm 0.27.2.dev1"]
    date = kept["vllm 0.33.0"].pop("date")
    assert {"machine", "revision"} < kept["vllm 0.33.0"].keys()
    assert kept["vllm 0.33.0"]["cells"] == {"proven": 2}
    kept["vllm 0.33.0"]["date"] = date
    rows = unlisted.table(kept).splitlines()[2:]
    assert rows[0] == f"| vllm 0.30.0 | 1 |  |  |  |  | 1 |  |  |  |  |  | 0% | 100% | {date} |"
    assert rows[1] == f"| vllm 0.33.0 | 2 |  |  | 2 |  |  |  |  |  |  |  | 100% | 0% | {date} |"


def test_the_page_shows_what_is_kept() -> None:
    assert matrix.block(unlisted.PAGE.read_text("utf-8"), unlisted.NAME) == unlisted.table(unlisted.read())
