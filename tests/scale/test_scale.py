"""The short form: no load without a fault is worse with the bundle. Of 0.1.9 it finds what was wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.tools.lab import revisions

from tests.releases import executed
from tests.scale import command, fleets, judge, plans
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

OF_THE_RELEASES = ("push_mixed",)
"""Drivers of fleets that the release tests play."""


@pytest.fixture(scope="module")
def interpreters() -> Iterator[list[Any]]:
    with command.pair() as both:
        yield both


@pytest.mark.parametrize("release", executed.ends(command.RELEASES))
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


@pytest.mark.parametrize(
    "fleet", [each for each in fleets.FLEETS if each.driver not in OF_THE_RELEASES], ids=lambda each: each.driver
)
def test_beside_no_bundle(fleet: fleets.Fleet, interpreters: list[Any], tmp_path: Path) -> None:
    """Each side of a pair has the bundle while the other has none. The long form has older bundles, too."""
    bundle = setups.made_bundle(tmp_path / "bundle")
    pairs = fleets.played(interpreters, command.RELEASES[-1], bundle, {"none": "none"}, fleet)
    assert command.found_in(pairs) == []
    assert len(pairs) == 2


def test_kept(tmp_path: Path) -> None:
    """A release's report replaces its last one, and no other's."""
    place = tmp_path / "scale.json"
    first, second = {"found": [], "seconds": [1, 2], "ends": {}}, {"found": ["it hangs"], "ends": {}}
    command.keep("0.33.0", {"loads": {"first": first}}, place)
    command.keep("0.29.0", {"loads": {}}, place)
    command.keep("0.33.0", {"loads": {"first": first, "second": second}}, place)
    assert json.loads(place.read_text(encoding="utf-8")) == {
        "0.29.0": {"loads": {}, "found": {}},
        "0.33.0": {"loads": {"first": [1, 2], "second": None}, "found": {"second": ["it hangs"]}},
    }


def test_acted(tmp_path: Path) -> None:
    """Bundles are counted, and not processes; a bundle that patched nothing is none."""
    assert fleets.acted(tmp_path) == 0
    for name, bundle, state in (("a", "new", "applied"), ("b", "new", "applied"), ("c", "old", "skipped")):
        report = {"bundle": bundle, "patches": [{"state": "armed"}, {"state": state}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")
    assert fleets.acted(tmp_path) == 1
    (tmp_path / "d.json").write_text(json.dumps({"bundle": "old", "patches": [{"state": "applied"}]}))
    assert fleets.acted(tmp_path) == 2


def test_judged() -> None:
    """What is judged worse, disproportionate, growing, or not as on stock, and what is not."""
    stock = {"ends": {"length": 3}, "grown": {"threads": 1}}
    small, large = {"patch": 5000, "few": 10}, {"patch": 10_900, "few": 1000}
    flat = [{"held": 10}, {"held": 60}, {"held": 50}, {"held": 80}]
    well = {"ends": {"length": 3}, "grown": {"threads": 1}, "operations": [small, large], "kept": flat, "slow": []}
    assert judge.findings(stock, well) == []
    under_way = [{"marks": number} for number in (11, 176, 220, 220, 242, 231, 484, 253)]
    assert judge.findings(stock, {**well, "kept": under_way}) == []
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
    fleet = {"first": [8, True], "left": 0}
    assert judge.differences(fleet, dict(fleet)) == []
    assert judge.differences(fleet, {"first": [8, False]}) == [
        "first: [8, False], on stock [8, True]",
        "left: None, on stock 0",
    ]
    fails = {judge.FAILS: "it ended with 1"}
    assert judge.differences(fails, fails) == ["the driver fails: it ended with 1, on stock it ended with 1"]
