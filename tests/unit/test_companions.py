"""Patches that rely on a second package's code: verified with it, refused where it has drifted, moot without it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.sitecustomize.decision import (
    Decision,
    Environment,
    Installed,
    Patch,
    PatchError,
    Variant,
    decide,
    judge_companion,
)
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools.commands import matrix
from vllm_livepatch.tools.commands.matrix import Cell, Matrix
from vllm_livepatch.tools.compatibility import check as checking
from vllm_livepatch.tools.compatibility.drift import drift
from vllm_livepatch.tools.releases import registry

from tests.unit.local_index import LocalIndex, make_wheel, serving
from tests.unit.support import PATCHED, PYTHON, STEP, STOCK, USE_STEP, Cli, Sandbox

TARGET, HIT, LOCKS = "engine.a:A.f", "cache.tracker:Tracker.hit", "cache.locks:free"
OLD, NEW = {HIT: "blocks"}, {HIT: "tokens", LOCKS: "free"}
PATCH = Patch(
    name="some-patch",
    package="engine",
    title="",
    targets=(TARGET,),
    calls=(HIT, LOCKS),
    variants=(Variant({TARGET: "f"}, ("1.0",)), Variant({TARGET: "fixed"}, ("2.0",), verdict="fixed-upstream")),
    companions={
        "cache": (
            Variant({}, ("0.3",), verdict="not-present"),
            Variant(OLD, ("0.4",)),
            Variant(NEW, ("0.5", "0.6")),
        )
    },
)


def decided(cache: dict[str, str], release: str | None, toggle: str = "auto", *, engine: str = "f") -> Decision:
    code = {TARGET: engine, HIT: None, LOCKS: None, **cache}
    engine_release = "1.0" if engine == "f" else "2.0"
    there = Installed(engine_release, code, companions={"cache": release})
    return decide(PATCH, there, Environment("auto", {PATCH.name: toggle}))


@pytest.mark.parametrize(
    ("cache", "release", "verdict", "applies"),
    [
        (OLD, "0.4", "needed", True),
        (NEW, "0.6", "needed", True),
        (NEW, "0.6+rocm700", "needed", True),
        (NEW, "0.7", "unverified", True),
        (NEW, None, "unverified", True),
        ({}, "0.3", "needed", True),
        ({}, "0.7", "drifted", False),  # it may have the code under other names
        ({}, None, "drifted", False),
        ({LOCKS: "free"}, "0.6", "drifted", False),
        ({**NEW, HIT: "somebody's edit"}, "0.6", "drifted", False),
        ({**OLD, LOCKS: "free"}, "0.6", "drifted", False),  # each known, not together
    ],
)
def test_the_verdict_is_that_of_both(cache: dict[str, str], release: str | None, verdict: str, applies: bool) -> None:
    decision = decided(cache, release)
    assert (decision.verdict, decision.apply, decision.wanted) == (verdict, applies, True)
    if verdict != "needed":
        assert f"cache {release or 'of unknown release'}" in decision.detail


def test_without_the_second_package_its_part_is_moot() -> None:
    there = Installed("1.0", {TARGET: "f", HIT: None, LOCKS: None})
    decision = decide(PATCH, there, Environment())
    assert (decision.verdict, decision.apply) == ("needed", True)
    assert judge_companion(PATCH, "cache", there)[0] == "not-present"


@pytest.mark.parametrize("name", [HIT, LOCKS])
def test_drift_names_what_was_renamed(name: str) -> None:
    """Other releases lack the field too, so that its absence alone is known."""
    detail = decided({one: code for one, code in NEW.items() if one != name}, "0.6").detail
    assert [one for one in NEW if one in detail] == [name]


def test_force_overrides_and_keeps_what_is_known_of_the_patched_package() -> None:
    decision = decided({**NEW, HIT: "edit"}, "0.6", "force")
    assert (decision.verdict, decision.apply, decision.reason) == ("drifted", True, "forced")
    assert decision.variant is PATCH.variants[0]


@pytest.mark.parametrize(
    ("toggle", "cache", "release", "verdict", "applies", "reason"),
    [
        ("auto", {HIT: "edit"}, "0.6", "fixed-upstream", False, "fixed-upstream"),
        ("on", {HIT: "edit"}, "0.6", "fixed-upstream", False, "fixed-upstream"),
        ("force", {HIT: "edit"}, "0.6", "drifted", True, "forced"),
        ("on", NEW, "0.6", "fixed-upstream", True, "on"),
        ("on", NEW, "0.7", "fixed-upstream", True, "on"),
    ],
)
def test_asked_for_where_it_is_not_needed(
    toggle: str, cache: dict[str, str], release: str, verdict: str, applies: bool, reason: str
) -> None:
    decision = decided(cache, release, toggle, engine="fixed")
    assert (decision.verdict, decision.apply, decision.reason) == (verdict, applies, reason)
    assert decision.wanted is applies, "there is no fault that is not mended"
    assert (HIT in decision.detail) is (toggle != "auto" and cache != NEW)


def test_drift_of_the_patched_package_comes_first() -> None:
    decision = decided({HIT: "edit"}, "0.6", engine="edit")
    assert (decision.verdict, "engine 2.0" in decision.detail) == ("drifted", True)


# What patch.toml says.

FACTS: dict[str, Any] = {
    "title": "t",
    "package": "engine",
    "targets": [TARGET],
    "calls": [HIT, LOCKS],
    "code": {TARGET: "f", LOCKS: "free"},
    "variant": [{"releases": ["1.0"], "code": {}}, {"releases": ["1.1"], "code": {TARGET: "g"}}],
    "companion": [
        {"package": "cache", "releases": ["0.3"], "verdict": "not-present", "code": {}},
        {"package": "cache", "releases": ["0.4"], "code": {HIT: "blocks", LOCKS: ""}},
        {"package": "cache", "releases": ["0.5"], "code": {HIT: "tokens"}},
    ],
}


def test_what_all_have_is_shown_once() -> None:
    patch = to_patch("p", FACTS)
    assert [dict(variant.code) for variant in patch.variants] == [{TARGET: "f"}, {TARGET: "g"}]
    assert [dict(form.code) for form in patch.companions["cache"]] == [{}, OLD, NEW]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"code": {"engine.z:z": "z"}}, "code has a name"),
        ({"companion": [{"package": "engine", "releases": ["1"], "code": {HIT: "b"}}]}, "another package"),
        ({"companion": [{"package": "other", "releases": ["1"], "code": {HIT: "b"}}]}, "stands in calls"),
        ({"companion": [{"package": "cache", "releases": ["1"], "code": {TARGET: "b"}}]}, "no call of cache"),
        ({"companion": [{"package": "cache", "releases": ["1"], "code": {LOCKS: ""}}]}, "not-present, and not both"),
        ({"targets": [TARGET, "cache.x:y"]}, "wraps none of it"),
        ({"variant": [{"releases": ["1.0"], "code": {TARGET: "f", HIT: "b"}}]}, "neither a target nor a call"),
    ],
)
def test_facts_that_cannot_be(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchError, match=message):
        to_patch("p", {**FACTS, **changed})


# A second package beside the fake engine.

TRACKER = "fakecache.tracker:Tracker.hit"
CACHE = {
    "fakecache/__init__.py": "raise SystemExit('imported')\n",
    "fakecache/_version.py": "version = '0.6'\n",
    "fakecache/tracker.py": "class Tracker:\n    def __init__(self):\n        self.hit = 0\n",
}


@pytest.fixture
def beside(sandbox: Sandbox) -> Path:
    """The second package's directory; a patch relies on what its tracker's `__init__` assigns."""
    site = sandbox.write(CACHE, sandbox.root / "cache")
    sandbox.write(CACHE)
    code = sandbox.fingerprints(TRACKER)
    for name in CACHE:
        (sandbox.site / name).unlink()
    (sandbox.site / "fakecache").rmdir()
    companion = [{"package": "fakecache", "releases": ["0.6"], "code": code}]
    sandbox.patch(
        calls=[TRACKER], companion=companion, variant=[{"releases": ["1.0"], "code": sandbox.fingerprints(STEP)}]
    )
    sandbox.generate()
    return site


def rename(site: Path) -> None:
    file = site / "fakecache" / "tracker.py"
    file.write_text(file.read_text("utf-8").replace("self.hit", "self.found"), "utf-8")


def test_a_process_looks_at_both_and_imports_neither(sandbox: Sandbox, beside: Path) -> None:
    path = [sandbox.bundle, sandbox.site, beside]
    done = sandbox.python(f"{USE_STEP}\nimport sys; print('fakecache' in sys.modules)", path=path)
    assert (done.out, done.code) == (f"{PATCHED}False\n", 0)
    assert sandbox.report()["packages"] == {"fakeengine": "1.0", "fakecache": "0.6"}
    assert sandbox.reported()["verdict"] == "needed"


def test_a_process_refuses_a_renamed_attribute(sandbox: Sandbox, beside: Path) -> None:
    rename(beside)
    done = sandbox.python(USE_STEP, path=[sandbox.bundle, sandbox.site, beside])
    assert done.out == STOCK
    patch = sandbox.reported()
    assert (patch["state"], patch["reason"], patch["verdict"]) == ("skipped", "drifted", "drifted")
    assert patch["detail"] == f"fakecache 0.6 has no {TRACKER}"
    assert "around is not applied (drifted): fakecache 0.6" in done.err


def test_a_process_without_the_second_package(sandbox: Sandbox, beside: Path) -> None:
    (sandbox.site / "fakecache").mkdir()  # a directory of that name is none of it
    assert sandbox.python(USE_STEP).out == PATCHED
    assert sandbox.report()["packages"] == {"fakeengine": "1.0"}


EDITABLE = """
import importlib.util, sys
class _EditableFinder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "fakecache":
            return importlib.util.spec_from_file_location(name, {init!r}, submodule_search_locations=[{place!r}])
sys.meta_path.append(_EditableFinder)
"""


def test_a_process_that_has_the_second_package_editable(sandbox: Sandbox, beside: Path) -> None:
    """As setuptools installs it: by a finder of its own, and so not on the path."""
    rename(beside)
    place = beside / "fakecache"
    done = sandbox.python(EDITABLE.format(init=str(place / "__init__.py"), place=str(place)) + USE_STEP)
    assert done.out == STOCK
    assert sandbox.reported()["reason"] == "drifted"


def checked(cli: Cli, sandbox: Sandbox, *arguments: str) -> tuple[dict[str, Any], int]:
    done = cli("check", "--json", "--no-diff", "--patch-dir", str(sandbox.patches), *arguments)
    answer = json.loads(done.out)
    (around,) = [patch for patch in answer["patches"] if patch["name"] == "around"]
    return {**around, "packages": answer["packages"]}, done.code


def test_check_says_what_a_process_would(
    sandbox: Sandbox, beside: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (sandbox.site, beside):
        sandbox.write({f"{place.name}.pth": ""}, sandbox.root / "whole")
    whole = sandbox.root / "whole"
    for package in (sandbox.site / "fakeengine", beside / "fakecache"):
        (whole / package.name).symlink_to(package)
    found, code = checked(cli, sandbox, "--site-packages", str(whole))
    assert (found["verdict"], code) == ("needed", 0)
    assert found["packages"] == {"fakeengine": "1.0", "fakecache": "0.6"}
    assert {one["target"] for one in found["targets"]} == {STEP, TRACKER}
    rename(beside)
    found, code = checked(cli, sandbox, "--site-packages", str(whole))
    assert (found["verdict"], found["detail"], code) == ("drifted", f"fakecache 0.6 has no {TRACKER}", 1)
    monkeypatch.setenv("PYTHONPATH", f"{sandbox.site}:{beside}")
    found, code = checked(cli, sandbox, "--python", PYTHON)
    assert (found["verdict"], found["detail"], code) == ("drifted", f"fakecache 0.6 has no {TRACKER}", 1)


def test_what_drifted_is_shown_beside_the_nearest_verified_release(sandbox: Sandbox, beside: Path) -> None:
    verified = shutil.copytree(beside, sandbox.root / "verified")
    rename(beside)
    patch = sandbox.entries()["around"].patch
    tree = Tree([str(sandbox.site), str(beside)])
    asked = []

    def fetch(package: str, release: str) -> Tree:
        asked.append((package, release))
        return Tree([str(verified)])

    found = drift(patch, installed.look(patch, tree), tree, fetch)
    assert found is not None
    assert (found.package, found.release, asked) == ("fakecache", "0.6", [("fakecache", "0.6")])
    (change,) = found.changes
    assert change.name == TRACKER
    assert [line for line in change.diff[2:] if line[0] in "+-"] == ["-        self.hit = 0"]
    assert found.described()["package"] == "fakecache"


def test_check_asks_an_interpreter_for_both(
    sandbox: Sandbox, beside: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone knows where an editable install is."""

    def interpreter_tree(python: str, packages: Iterable[str]) -> checking.InterpreterTree:
        places = {"fakeengine": [str(sandbox.site / "fakeengine")], "fakecache": [str(beside / "fakecache")]}
        there = {name: place for name, place in places.items() if name in packages}
        return checking.InterpreterTree([], there, (3, 11))

    rename(beside)
    monkeypatch.setattr(checking, "interpreter_tree", interpreter_tree)
    found, code = checked(cli, sandbox, "--python", PYTHON)
    assert (found["verdict"], code) == ("drifted", 1)


def test_check_of_published_releases_of_both(
    sandbox: Sandbox, beside: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(LocalIndex()) as index:
        for package, version, place in (("fakeengine", "1.0", sandbox.site), ("fakecache", "0.6", beside)):
            files = {file.relative_to(place).as_posix(): file.read_bytes() for file in place.rglob("*.py")}
            index.add(package, f"{package}-{version}-py3-none-any.whl", make_wheel(package, version, files))
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("XDG_CACHE_HOME", str(sandbox.root / "kept"))
        monkeypatch.setattr(registry, "all_pins", lambda package: ())
        asked = ("--release", "fakeengine==1.0")
        found, code = checked(cli, sandbox, *asked, "--release", "fakecache==0.6")
        assert (found["verdict"], code) == ("needed", 0)
        assert found["packages"] == {"fakeengine": "1.0", "fakecache": "0.6"}
        found, code = checked(cli, sandbox, *asked)  # the other counts as not installed
        assert (found["verdict"], found["packages"], code) == ("needed", {"fakeengine": "1.0"}, 0)


def test_check_of_one_of_the_two(sandbox: Sandbox, beside: Path, cli: Cli) -> None:
    found, code = checked(cli, sandbox, "--site-packages", str(sandbox.site))
    assert (found["verdict"], found["packages"], code) == ("needed", {"fakeengine": "1.0"}, 0)


def test_show_lists_the_second_packages_releases(sandbox: Sandbox, beside: Path, cli: Cli) -> None:
    done = cli("show", "around", "--patch-dir", str(sandbox.patches))
    assert "Releases of fakecache that it relies on" in done.out
    assert "0.6" in done.out.partition("Releases of fakecache")[2]


def test_the_matrix_has_a_row_for_each_package() -> None:
    cells = {("engine", "1.0"): Cell("needed", "executed", ""), ("cache", "0.5"): Cell("needed", "executed", "")}
    *_, first, second = matrix.markdown(Matrix(tuple(cells), (PATCH,), {PATCH.name: cells})).splitlines()
    assert (first, second) == (
        "| `some-patch` | engine | **1.0** | on |",
        "| `some-patch` | cache, relied on | **0.5** |  |",
    )
