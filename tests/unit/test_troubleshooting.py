"""docs/troubleshooting.md leads to each patch, by messages that the patch's own symptom has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from vllm_livepatch.tools.bundles import catalogue

ENTRIES = catalogue.load()
PAGE = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text("utf-8")
ROWS = [row.strip("| ").split(" | ") for row in re.findall(r"^\|.+\|$", PAGE, re.M) if "---" not in row]


def named(cell: str) -> list[str]:
    return [name for name in re.findall(r"`([^`]+)`", cell) if name in ENTRIES]


def test_every_patch_is_there() -> None:
    assert {name for _, patches in ROWS for name in named(patches)} == ENTRIES.keys()


@pytest.mark.parametrize(("seen", "patches"), [row for row in ROWS if named(row[1])])
def test_a_message_is_one_of_the_patchs_symptom(seen: str, patches: str) -> None:
    symptoms = " ".join(" ".join(ENTRIES[name].facts["about"]["symptom"].split()) for name in named(patches))
    for message in re.findall(r"`([^`]+)`", seen):
        assert message in symptoms
