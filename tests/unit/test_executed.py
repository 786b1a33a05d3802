"""The record of what the release tests executed, against what the matrix claims."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.sitecustomize.decision import Patch, Variant
from vllm_livepatch.tools.matrix import Cell, Matrix

FILE = Path(__file__).parents[1] / "releases/executed.py"
spec = importlib.util.spec_from_file_location("executed", FILE)
assert spec is not None
assert spec.loader is not None
executed: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(executed)

PATCH = Patch("one-patch", "vllm", "One", ("vllm.a:f",), (), (Variant({"vllm.a:f": "0" * 16}, ("1.0",)),))
ABOUT = {"test_one.py": ["one-patch"], "test_other.py": ["other"]}


def ran(release: str, *applied: str, file: str = "test_one.py") -> dict[str, Any]:
    return {"file": file, "driver": "one", "releases": {"vllm": release}, "applied": list(applied)}


def claims(verdict: Any, known: Any, *lines: dict[str, Any]) -> list[str]:
    cells = {("vllm", "1.0"): Cell(verdict, known, "")}
    made = Matrix(tuple(cells), (PATCH,), {"one-patch": cells})
    return list(executed.overclaimed(made, executed.gathered(lines, ABOUT)))


@pytest.mark.parametrize(
    ("lines", "lacking"),
    [
        ([], "patched and stock"),
        ([ran("1.0")], "patched"),
        ([ran("1.0", "other")], "patched"),
        ([ran("1.0", "one-patch")], "stock"),
        ([ran("1.0"), ran("1.1", "one-patch")], "patched"),
        ([ran("1.0"), ran("1.0", "one-patch", file="test_other.py")], "patched"),
        ([ran("1.0"), ran("1.0", "one-patch")], None),
    ],
)
def test_needed_takes_a_run_without_the_patch_and_one_with_it(lines: list[Any], lacking: str | None) -> None:
    expected = [] if lacking is None else [f"one-patch on vllm==1.0: needed, not run {lacking}"]
    assert claims("needed", "executed", *lines) == expected


def test_a_release_that_is_left_alone_takes_a_run_without_it() -> None:
    assert claims("fixed-upstream", "executed") == ["one-patch on vllm==1.0: fixed-upstream, not run stock"]
    assert claims("fixed-upstream", "executed", ran("1.0", "other")) == []


def test_what_is_only_read_claims_nothing() -> None:
    assert claims("needed", "read") == []


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
    assert first == ran("1.0", "one-patch", file="tests/releases/test_one.py")
    assert second == ran("1.0", file="tests/releases/test_one.py")
    assert "executed" not in sys.modules, "the release tests' module of that name is theirs"
