"""What is kept and what is read stays small: a table needs a few kilobytes, and nobody reads half a megabyte."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULT = 8 * 1024
"""Bytes of one kept result."""
PAGES = 500_000
"""Bytes of all pages, without pictures."""


@pytest.mark.parametrize("file", sorted((ROOT / "tests/results").rglob("*.json")), ids=lambda file: file.name)
def test_a_kept_result_holds_what_its_table_shows(file: Path) -> None:
    assert file.stat().st_size <= RESULT


def test_the_pages_are_no_more_than_somebody_reads() -> None:
    pages = list((ROOT / "docs").rglob("*.md"))
    assert len(pages) > 30
    assert sum(page.stat().st_size for page in pages) < PAGES
