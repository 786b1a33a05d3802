"""Patches by what one runs, in `list`, `check` and the index; and what a recipe's owner is told of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize import settings
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.in_bundle import grouping
from vllm_livepatch.tools.upkeep import patch_pages

from tests.unit.support import WORK, Cli, Sandbox
from tests.unit.test_doctor import ask

ROOT = Path(__file__).parents[2]
PATCHES = {entry.patch.name: entry.patch for entry in catalogue.load().values()}
GROUPED = {group: sorted(name for name, patch in PATCHES.items() if patch.group == group) for group in settings.GROUPS}


def blocks(text: str) -> dict[str, list[str]]:
    """The names below each heading of a table, by heading."""
    found: dict[str, list[str]] = {}
    rows: list[str] = []
    for row in text.splitlines():
        if re.fullmatch(r" *\S.*:\s*", row):
            rows = found.setdefault(row.strip().rstrip(":"), [])
        elif row.strip():
            rows.append(row.split()[0])
        else:
            rows = []
    return found


def test_each_patch_is_in_one_of_the_groups_that_have_a_variable() -> None:
    assert grouping.TITLES.keys() == set(settings.GROUPS)
    assert all(GROUPED.values())
    assert sorted(name for names in GROUPED.values() for name in names) == sorted(PATCHES)


def test_the_list_is_by_group_and_fits_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = cli("list").out
    assert blocks(out) == {grouping.TITLES[group]: names for group, names in GROUPED.items()}
    assert max(len(row.rstrip()) for row in out.splitlines()) <= 80
    assert "\nLIVEPATCH_GROUP_SCHEDULER=off turns a group off" in out


def test_json_is_not_by_group(cli: Cli) -> None:
    assert [one["name"] for one in json.loads(cli("list", "--json").out)] == list(PATCHES)


def test_check_is_by_group_here_and_in_a_bundle(sandbox: Sandbox, cli: Cli) -> None:
    sandbox.patch("b-one", group="nixl")
    sandbox.patch("a-two", [WORK], group="mine")
    sandbox.patch("c-three", [WORK])
    sandbox.patch("d-four", [WORK], group="scheduler")
    sandbox.generate()
    expected = {"scheduler": ["d-four"], "NIXL": ["b-one"], "mine": ["a-two"], "in no group": ["c-three"]}
    assert blocks(ask(sandbox, "check").out) == expected
    own = ("--patch-dir", str(sandbox.patches), "--only", "--site-packages", str(sandbox.site))
    assert blocks(cli("check", "--verbose", *own).out.partition("\n4 of 4 apply")[0]) == expected
    rows = cli("check", *own).out.partition("\n4 of 4 apply")[0].splitlines()
    assert [row.partition(" ")[0] for row in rows][-4:] == [
        name for names in expected.values() for name in names
    ]  # in their order, without headings
    names = [one["name"] for one in json.loads(cli("check", "--json", *own).out)["patches"]]
    assert names == ["a-two", "b-one", "c-three", "d-four"]


def test_patches_without_groups_have_no_headings(patched: Sandbox) -> None:
    assert blocks(ask(patched, "check").out) == {}


def test_the_index_is_by_group() -> None:
    sections = patch_pages.index(list(PATCHES.values())).split("\n## ")[1:]
    assert [section.partition("\n")[0].lower() for section in sections] == [
        grouping.TITLES[group].lower() for group in settings.GROUPS
    ]
    for section, (group, names) in zip(sections, GROUPED.items(), strict=True):
        assert re.findall(r"^\| \[`([^`]+)`\]", section, re.M) == names
        assert f"`LIVEPATCH_GROUP_{group.upper()}=off`" in section


def test_a_recipes_owner_finds_each_old_variable() -> None:
    page = (ROOT / "docs/recipes.md").read_text("utf-8").partition("<!-- patches")[2]
    replaced = page.partition("\n## ")[0]
    for patch in PATCHES.values():
        rows = [row for row in replaced.splitlines() if f"(patches/{patch.name}.md)" in row]
        whats = [row.split(" | ")[0] for row in rows]
        for old in (*patch.aliases, *(alias for option in patch.options for alias in option.aliases)):
            assert any(f"`{old}`" in what for what in whats), old
        for one in patch.about.get("replaces", ()):
            assert one.keys() == {"what", "delete"}
    for name in re.findall(r"`(LIVEPATCH_\w+)", replaced):
        assert settings.read(list(PATCHES.values()), {name: "1"}).notes == (), name
