"""Each patch says what it keeps, and what it takes for the end of a peer or a hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_livepatch.tools.bundles import catalogue

from tests.unit.keeping import kept

PATCHES = Path(__file__).parents[2] / "patches"
WORDS = 40


@pytest.mark.parametrize("name", list(catalogue.load()))
def test_all_that_outlives_a_call_is_named(name: str) -> None:
    """An entry for a class is one for all that its objects keep."""
    about = catalogue.load()[name].patch.about
    found = kept(PATCHES / name.replace("-", "_"))
    named = set(about.get("keeps", ()))
    assert {one for one in found if one not in named and one.partition(".")[0] not in named} == set()
    assert {one for one in named if one not in found and not any(of.startswith(f"{one}.") for of in found)} == set()
    assert all(meaning.endswith(".") and len(meaning.split()) <= WORDS for meaning in about.get("keeps", {}).values())
    assert about.get("gone", ".").endswith(".")


CODE = """
import threading
from collections import deque
STATE = "_livepatch_state"
_all: list[int] = []
NAMES = ("a", "b")
class Row:
    shared = {}
    def __init__(self):
        self.waiting: deque[int] = deque()
        self.number = 0
        self.by_name = {name: 1 for name in NAMES}
    def go(self):
        found = []
        threading.Thread(target=self.go).start()
        return found
def wrappers(livepatch):
    known: dict[str, int] = {}
    def one():
        seen = set()
        return seen
    return {"module:f": one}
"""


def test_what_counts_as_kept(tmp_path: Path) -> None:
    (tmp_path / "wrappers.py").write_text(CODE)
    assert kept(tmp_path) == {"_livepatch_state", "_all", "Row.shared", "Row.waiting", "Row.by_name", "Thread", "known"}
