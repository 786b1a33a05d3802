"""The record of what the release tests executed, against what the matrix claims."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.sitecustomize.decision import Patch, Variant
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.bundles.patch_files import PROOF
from vllm_livepatch.tools.commands.matrix import Cell, Matrix

FILE = Path(__file__).parents[1] / "releases/executed.py"
spec = importlib.util.spec_from_file_location("executed", FILE)
assert spec is not None
assert spec.loader is not None
executed: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(executed)

PATCH = Patch("one-patch", "vllm", "One", ("vllm.a:f",), (), (Variant({"vllm.a:f": "0" * 16}, ("1.0",)),))
ABOUT = {"test_one.py": ["one-patch"], "test_half.py": ["one-patch"], "test_other.py": ["other"]}


def ran(release: str, *applied: str, file: str = "test_one.py") -> dict[str, Any]:
    return {"file": file, "driver": "one", "releases": {"vllm": release}, "applied": list(applied)}


def fully(verdict: Any, *lines: dict[str, Any]) -> dict[str, Any]:
    cells = {("vllm", "1.0"): Cell(verdict, "read", "")}
    made = Matrix(tuple(cells), (PATCH,), {"one-patch": cells})
    return dict(executed.fully(made, executed.gathered(lines, ABOUT)))


FILE_OF = "test_one.py"
WHOLE = {"one-patch": {FILE_OF: {"vllm": ["1.0"]}}}


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], {}),
        ([ran("1.0")], {}),
        ([ran("1.0", "other")], {}),
        ([ran("1.0", "one-patch")], {}),
        ([ran("1.0"), ran("1.1", "one-patch")], {}),
        ([ran("1.0"), ran("1.0", "one-patch", file="test_other.py")], {}),
        ([ran("1.0"), ran("1.0", "one-patch", file="test_half.py")], {}),
        ([ran("1.0"), ran("1.0", "one-patch")], WHOLE),
        ([ran("1.0"), ran("1.0", "one-patch"), ran("1.0", file="test_half.py")], WHOLE),
    ],
)
def test_needed_takes_a_run_without_the_patch_and_one_with_it_by_one_file(
    lines: list[Any], found: dict[str, Any]
) -> None:
    assert fully("needed", *lines) == found


def test_a_release_that_is_left_alone_takes_a_run_without_it() -> None:
    assert fully("fixed-upstream") == {}
    assert fully("fixed-upstream", ran("1.0", "other")) == WHOLE


def test_what_is_kept_and_was_not_run_is_named() -> None:
    assert executed.overclaimed(WHOLE, WHOLE) == []
    assert executed.overclaimed(WHOLE, {}) == ["one-patch on vllm==1.0, by test_one.py"]
    other = {"one-patch": {"test_half.py": {"vllm": ["1.0"]}}}
    assert executed.overclaimed(other, WHOLE) == ["one-patch on vllm==1.0, by test_half.py"]
    assert executed.overclaimed({}, WHOLE) == []


def test_a_process_that_plays_both_ways_is_both() -> None:
    assert fully("needed", {**ran("1.0", "one-patch"), "with_stock": True}) == WHOLE
    assert fully("needed", {**ran("1.0"), "with_stock": True}) == {}


def test_releases_are_those_of_ci_or_by_hand_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(executed.SELECTION, raising=False)
    assert executed.chosen(["1.0", "3.0"], ["1.0", "2.0", "3.0"]) == ["1.0", "3.0"]
    monkeypatch.setenv(executed.SELECTION, "2.0,3.0,4.0")
    assert executed.chosen(["1.0", "3.0"], ["1.0", "2.0", "3.0"]) == ["2.0", "3.0"]
    monkeypatch.setenv(executed.SELECTION, "all")
    assert executed.chosen(["1.0"], ["1.0", "2.0"]) == ["1.0", "2.0"]


def test_of_many_releases_ci_has_the_first_or_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(executed.SELECTION, raising=False)
    every = ["1.0", "1.1", "1.2"]
    assert (executed.first(every), executed.ends(every)) == (["1.0"], ["1.0", "1.2"])
    monkeypatch.setenv(executed.SELECTION, "all")
    assert executed.first(every) == executed.ends(every) == every


def test_a_run_of_some_files_adds_to_the_record() -> None:
    other = {"one-patch": {FILE_OF: {"vllm": ["1.10", "1.9"]}}, "two": {"test_two.py": {"lmcache": ["2.0"]}}}
    joined = {"one-patch": {FILE_OF: {"vllm": ["1.0", "1.9", "1.10"]}}, "two": {"test_two.py": {"lmcache": ["2.0"]}}}
    assert executed.both(WHOLE, other) == joined


def test_a_file_says_which_faults_it_shows(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text('PATCH = "one-patch"\nOTHER = "another"\n')
    assert executed.shown_by(file) == ["one-patch"]
    file.write_text('PATCHES = ("one-patch", "two")\n')
    assert executed.shown_by(file) == ["one-patch", "two"]
    file.write_text('def test():\n    PATCH = "one-patch"\n')
    assert executed.shown_by(file) == []


def test_every_patch_has_a_file_that_shows_its_fault() -> None:
    shown = [name for file in sorted(FILE.parent.glob("test_*.py")) for name in executed.shown_by(file)]
    proven = [name for name, entry in catalogue.load().items() if (entry.folder / PROOF).is_file()]
    assert {*shown, *proven} == {*catalogue.load()}


def run(code: str, revision: str, *releases: str, date: str = "2026-01-01", file: str = FILE_OF) -> dict[str, Any]:
    return {"file": file, "code": code, "date": date, "revision": revision, "releases": {"vllm": [*releases]}}


def test_the_newest_run_by_hand_of_each_release_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CI runs is not kept, nor what was run of another code of the patch."""
    monkeypatch.setattr(executed.time, "strftime", lambda _: "2026-01-02")
    kept = {"one-patch": [run("old", "a", "1.0"), run("now", "b", "1.1", "1.2")], "two": [run("x", "c", "1.0")]}
    ran_now = {
        name: {FILE_OF: {"vllm": found}} for name, found in [("one-patch", ["1.2", "1.3", "1.4"]), ("two", ["1.4"])]
    }
    in_ci = {name: {FILE_OF: {"vllm": ["1.4"]}} for name in ("one-patch", "two")}
    found = executed.with_runs(kept, ran_now, in_ci, {"one-patch": "now", "two": "x"}, "d")
    assert found == {
        "one-patch": [run("now", "b", "1.1"), run("now", "d", "1.2", "1.3", date="2026-01-02")],
        "two": [run("x", "c", "1.0")],
    }
    more = {"one-patch": {FILE_OF: {"vllm": ["1.10", "1.3"]}}}
    again = executed.with_runs(found, more, {}, {"one-patch": "now"}, "d")
    assert again == {"one-patch": [run("now", "b", "1.1"), run("now", "d", "1.2", "1.3", "1.10", date="2026-01-02")]}


def test_runs_by_hand_of_two_files_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executed.time, "strftime", lambda _: "2026-01-02")
    kept = {"one-patch": [run("now", "a", "1.0", "1.1"), run("now", "a", "1.0", file="test_half.py")]}
    ran_now = {"one-patch": {"test_half.py": {"vllm": ["1.1"]}}}
    in_ci = {"one-patch": {"test_half.py": {"vllm": ["1.0"]}}}
    assert executed.with_runs(kept, ran_now, in_ci, {"one-patch": "now"}, "d") == {
        "one-patch": [
            run("now", "d", "1.1", date="2026-01-02", file="test_half.py"),
            run("now", "a", "1.0", "1.1"),
        ]
    }


def test_a_line_is_left_of_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    state.mkdir()
    patches = [{"name": "one-patch", "state": "applied"}, {"name": "other", "state": "skipped"}]
    (state / "a.json").write_text(json.dumps({"patches": patches}))
    record = tmp_path / "record"
    record.mkdir()
    monkeypatch.setenv(executed.VARIABLE, str(record))
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/releases/test_one.py::test[1.0] (call)")
    executed.note("one", {"vllm": "1.0"}, state)
    executed.note("one", {"vllm": "1.0"}, None)
    (file,) = record.iterdir()
    first, second = map(json.loads, file.read_text().splitlines())
    where = {"file": "tests/releases/test_one.py", "case": "test[1.0]"}
    assert first == ran("1.0", "one-patch") | where
    assert second == ran("1.0") | where
    assert "executed" not in sys.modules, "the release tests' module of that name is theirs"


def test_a_proof_counts_for_its_patch_also_where_tests_were_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(executed.VARIABLE, str(tmp_path))
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/releases/test_proofs.py::test_proof[1.0] (call)")
    executed.note("one", {"vllm": "0.9"}, None)
    executed.note_proof("one-patch", {"vllm": "1.0"}, proven=True)
    executed.note_proof("one-patch", {"vllm": "2.0"}, proven=False)
    record = executed.read(tmp_path, only_proofs=True)
    assert record == {
        "one-patch": {"test_proofs.py": {("vllm", "1.0"): {"stock", "patched"}, ("vllm", "2.0"): {"stock"}}}
    }
