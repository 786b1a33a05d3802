"""The figures of the pages: each from a JSON that a command wrote, and shown as it is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_livepatch.tools.bench import __main__ as bench
from vllm_livepatch.tools.bench import figures
from vllm_livepatch.tools.bench.figures import Figures

ROOT = Path(__file__).parents[2]
PLACE = ROOT / figures.PLACE
PAGES = {file.relative_to(ROOT): file.read_text("utf-8") for pattern in figures.PAGES for file in ROOT.glob(pattern)}


@pytest.mark.parametrize("page", sorted(PAGES), ids=str)
def test_a_page_shows_what_is_kept(page: Path) -> None:
    """`python -m vllm_livepatch.tools.bench --write` puts it there."""
    assert figures.filled(PAGES[page], PLACE, with_sources=page.name != "README.md") == PAGES[page]


@pytest.mark.parametrize("name", [*bench.BENCHMARKS, *bench.WITH_ENGINES])
def test_what_is_kept_says_how_it_was_made(name: str) -> None:
    result = json.loads((PLACE / f"{name}.json").read_text("utf-8"))
    assert result["command"].startswith(f"python -m vllm_livepatch.tools.bench.{name}")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert re.fullmatch(r"[0-9a-f]{7,}", result["revision"])
    assert "cores" in result["machine"]
    assert result["rows"]
    assert all(len(row) == len(result["columns"]) for row in result["rows"])


def test_all_that_is_kept_is_made_and_shown() -> None:
    kept = {file.stem for file in PLACE.iterdir()}
    assert kept == {*bench.BENCHMARKS, *bench.WITH_ENGINES}
    blocks = [block for text in PAGES.values() for block in re.findall(r"<!-- figures: ([^>]+) -->", text)]
    assert {part.split()[0] for block in blocks for part in block.split(";")} == kept


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (7.564, "7.56 s"),
        (51.31, "51.3 s"),
        (0.0321, "32.1 ms"),
        (225e-6, "225 us"),
        (4e-8, "0.04 us"),
        (-0.0015, "-1.50 ms"),
        (0.0, "0.00 us"),
        (1234.0, "1,234 s"),
    ],
)
def test_a_duration(seconds: float, shown: str) -> None:
    assert figures.duration(seconds) == shown


def test_a_pair_is_compared_round_by_round() -> None:
    """Medians of the ratios and differences, which are not those of the medians."""
    stock, patched = [1.0, 2.0, 4.0], [1.5, 2.0, 4.4]
    assert figures.ratio(patched, stock) == "1.100"
    assert figures.difference(patched, stock) == "400 ms (0.00 us to 500 ms)"
    with pytest.raises(ValueError, match="zip"):
        figures.ratio(patched, stock[:2])


@pytest.mark.parametrize(
    ("count", "ranks"), [(3, (1, 3)), (5, (1, 5)), (6, (1, 6)), (10, (2, 9)), (12, (3, 10)), (100, (40, 61))]
)
def test_the_interval_of_a_median(count: int, ranks: tuple[int, int]) -> None:
    """The ranks that tables of order statistics give for 95 %."""
    assert figures.interval([float(number) for number in range(count, 0, -1)]) == ranks


def test_what_changed_is_named_cell_by_cell() -> None:
    old = {"columns": ["", "stock"], "rows": [["a", "1 s"], ["b", "2 s"]]}
    new = {"columns": ["", "stock"], "rows": [["a", "1 s"], ["b", "3 s"]]}
    assert figures.changes(old, new) == ["b, stock: 2 s -> 3 s"]
    assert figures.changes(old, old) == []
    assert figures.changes(None, new) == figures.changes(old, {**new, "columns": ["", "patched"]})


def test_a_run_prints_what_changed_keeps_it_and_fills_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    (tmp_path / figures.PLACE).mkdir(parents=True)
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("# Page\n<!-- figures: one 2 -->\nold\n<!-- /figures -->\nrest\n", "utf-8")
    (tmp_path / "README.md").write_text("<!-- figures: one; one 1 -->\n<!-- /figures -->\n", "utf-8")
    rows = [["a", "1 s"], ["b", "2 s"]]
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    monkeypatch.setattr(bench, "BENCHMARKS", {"one": lambda: Figures("python one", ["", "stock"], rows)})
    for words, printed in ([], "one: new rows or columns\n"), (["--write"], "one: new rows or columns\n"), ([], ""):
        monkeypatch.setattr(sys, "argv", ["bench", *words])
        with pytest.raises(SystemExit):
            bench.main()
        assert capsys.readouterr().out == printed
        assert ("old" in page.read_text("utf-8")) == (not (tmp_path / figures.PLACE / "one.json").exists())
    lines = page.read_text("utf-8").splitlines()
    assert lines[2:5] == ["|  | stock |", "|---|---:|", "| b | 2 s |"]
    assert lines[6].startswith("`python one`, 20")
    assert "revision " in lines[6]
    assert lines[-2:] == ["<!-- /figures -->", "rest"]
    assert (tmp_path / "README.md").read_text("utf-8").splitlines()[3:] == [
        "| a | 1 s |",
        "| b | 2 s |",
        "| a | 1 s |",
        "<!-- /figures -->",
    ]
    rows[1][1] = "3 s"
    with pytest.raises(SystemExit):
        bench.main()
    assert capsys.readouterr().out == "one: b, stock: 2 s -> 3 s\n"


def test_a_benchmark_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "reapr"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench: there is no reapr; there are startup, ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--python", "/bin/ls"], "bench: --python goes with --long"),
        (["--long", "gpu", "--python", "/bin/true"], "bench: --python /bin/true: it is no Python"),
        (["--long", "nope"], "bench: what is kept and written is a checkout's: this runs in none"),
        (["reaper", "--write"], "bench: what is kept and written is a checkout's: this runs in none"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_measures_nothing(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured() -> Figures:
        raise AssertionError

    if "none" in message:
        monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    monkeypatch.setattr(bench, "BENCHMARKS", {"reaper": measured})
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"
