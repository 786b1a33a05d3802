"""The short form: no load without a fault is worse with the bundle. Of 0.1.9 it finds what was wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.tools.lab import revisions

from tests.scale import command, judge, plans
from tests.simulation import setups

VERSION_0_1_9 = "c775e6c"
FOUND = {
    "long prompt": "patched with RecursionError",
    "crowd of 128 hits": "chunked_lmcache_load executes",
    "ends": "the first entry of stale_finished_recving.early_sends.ChildSends.ended is searched for",
    "push": "nixl_push_failures executes",
    "life, ids kept": "stock ends with",
}
"""What is wrong with version 0.1.9 on its newest releases, by the load that shows it."""


@pytest.fixture(scope="module")
def interpreters() -> Iterator[list[Any]]:
    with command.pair() as both:
        yield both


@pytest.mark.parametrize("release", command.RELEASES)
def test_never_worse_than_stock(release: str, interpreters: list[Any], tmp_path: Path) -> None:
    bundle = setups.made_bundle(tmp_path / "bundle")
    assert command.found_in(command.compare(interpreters, release, bundle, plans.SHORT)) == []


def test_finds_what_was_wrong(interpreters: list[Any], tmp_path: Path) -> None:
    """The loads that show what version 0.1.9 did wrong, on one release."""
    revisions.command_line("generate", "--out", str(tmp_path / "bundle"), path=revisions.checkout(VERSION_0_1_9))
    groups = [plans.Group(group.environ, [job for job in group.jobs if job["name"] in FOUND]) for group in plans.SHORT]
    loads = command.compare(interpreters, "0.29.0", tmp_path / "bundle", groups)
    for name, words in FOUND.items():
        assert any(words in finding for finding in loads[name]["found"]), (name, loads[name])


def test_judged() -> None:
    """What is judged worse, disproportionate or growing, and what is not."""
    stock = {"ends": {"length": 3}, "grown": {"threads": 1}}
    small, large = {"patch": 5000, "few": 10}, {"patch": 10_900, "few": 1000}
    flat = [{"held": 10}, {"held": 60}, {"held": 50}, {"held": 80}]
    well = {"ends": {"length": 3}, "grown": {"threads": 1}, "operations": [small, large], "kept": flat, "slow": []}
    assert judge.findings(stock, well) == []
    assert judge.findings(stock, {**well, "ends": "RecursionError in query"}) == [
        "stock ends with {'length': 3}, patched with RecursionError in query"
    ]
    assert judge.findings(stock, {**well, "operations": [small, {"patch": 11_001}]}) == [
        "patch executes 5000 operations, and 11001 for twice the load"
    ]
    grows = [{"held": number} for number in (100, 200, 300, 600)]
    assert judge.findings(stock, {**well, "kept": grows}) == ["held grows: [100, 200, 300, 600]"]
    assert judge.findings(stock, {**well, "slow": ["held"]}) == ["the first entry of held is searched for"]
    assert judge.findings(stock, {**well, "grown": {"threads": 2}}) == ["threads: 2 more, on stock 1"]
    dead = {"ends": "AssertionError in schedule"}
    assert judge.findings(dead, dead) == [
        "stock itself ends with AssertionError in schedule: the load shows nothing of the bundle"
    ]
