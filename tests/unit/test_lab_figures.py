"""The documentation's figures are those of the results that are kept beside it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.tools import cli
from vllm_livepatch.tools.bench import layerwise, long
from vllm_livepatch.tools.commands import ending, matrix
from vllm_livepatch.tools.lab import command, figures, lab, loads, topology

from tests.simulation import report
from tests.unit.test_lab_demo import result

ROOT = Path(__file__).parents[2]
PLACES = sorted((ROOT / "tests/results").glob("lab*"))
KEPT = sorted(file for place in PLACES for file in place.glob("*.json"))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_the_pages_tables_are_made_of_what_is_kept(place: Path) -> None:
    """`python -m vllm_livepatch.tools.lab.figures --place tests/results/NAME --write PAGE` puts them there."""
    page = ROOT / long.lab_page(place.name)
    assert matrix.block(page.read_text("utf-8"), place.name) == figures.markdown(place)


def test_the_patched_engines_live_and_answer_right() -> None:
    """As the pages say: only a part that is dead fails requests, and only on a GPU outputs differ, by rounding."""
    failed, differ = set(), set()
    for file in KEPT:
        setup = json.loads(file.read_text("utf-8"))["setups"]["patched"]
        assert setup["survived"], file
        failed |= {file.stem} if setup["failed"] else set()
        differ |= {f"{file.parent.name}/{file.stem}"} if setup["mismatches"] else set()
    assert {name.rpartition("-")[0] for name in failed} == {"kill-decode", "kill-decode-again", "kill-prefill"}
    assert differ == {f"lab-gpu/{name}-0.26.0" for name in ("hang-ups", "hang-ups-again", "no-connector")}


def test_no_figure_stands_beside_the_tables_of_the_runs() -> None:
    """A digit with a unit after it, outside of tables, links and code; a release is none."""
    text = (ROOT / "docs/lab-results.md").read_text("utf-8")
    text = re.sub(
        r"<!-- ([\w-]+) -->.*?<!-- /\1 -->|^```.*?^```|^\|[^\n]*|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE
    )
    assert re.findall(r"(?<![\w.])\d[\d,.]*\s?(?:%|(?:[mu]?s|[KMG]i?B|cores|times|answers|requests)\b)", text) == []


def test_the_readmes_tables_are_made_of_what_is_kept() -> None:
    text = (ROOT / "README.md").read_text("utf-8")

    def setups(name: str) -> list[dict[str, Any]]:
        return list(json.loads((ROOT / f"tests/results/{name}.json").read_text("utf-8"))["setups"].values())

    stock, patched = setups("lab/lmcache-disconnects-0.32.0")
    assert f"| survived | dead after {stock['died_after']:.1f} s: " in text
    assert patched["survived"]
    for called, figure in (
        ("completed", "completed"),
        ("failed", "failed"),
        ("outputs that differ from", "mismatches"),
    ):
        assert re.search(rf"^\| {called}[^|]*\| {stock[figure]} \| {patched[figure]} \|$", text, re.MULTILINE)
    rows = re.findall(r"^\| .*, vLLM [\d.]+ \| (\d+ of \d+ \| \d+ of \d+) \|$", text, re.MULTILINE)
    assert rows == [
        " | ".join(f"{setup['mismatches']} of {setup['completed']}" for setup in setups(f"lab-lease/{name}"))
        for name in ("late-0.29.0", "late-0.32.0", "stopped-0.29.0", "stopped-0.32.0")
    ]


def test_what_is_noted_of_a_run_stands_under_the_table(tmp_path: Path) -> None:
    kept = KEPT[0].read_text("utf-8")
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(kept, "utf-8")
    (tmp_path / "two.txt").write_text("It is older than the other.\n", "utf-8")
    assert figures.markdown(tmp_path).partition("\n\n")[2] == "- `two`: It is older than the other.\n"


def test_the_table_of_what_leaves_early_is_made_of_what_is_kept() -> None:
    """`bench.layerwise --kept tests/results/layerwise.json --write docs/layerwise.md --table layerwise` puts it there."""
    kept = json.loads((ROOT / "tests/results/layerwise.json").read_text("utf-8"))
    assert {"command", "date", "revision", "machine"} <= kept.keys()
    page = (ROOT / "docs/layerwise.md").read_text("utf-8")
    assert matrix.block(page, "layerwise").strip() == layerwise.markdown(kept).strip()


def test_the_table_of_worlds_is_made_of_what_is_kept() -> None:
    """`python -m tests.simulation.report tests/results/simulation.json` puts it there."""
    kept = json.loads((ROOT / "tests/results/simulation.json").read_text("utf-8"))
    shown = (ROOT / "docs/simulation.md").read_text("utf-8").partition(report.BEGIN)[2]
    assert shown.strip() == report.table(kept)
    for run in kept:
        assert f"{run['setup']}: {run['date']}, revision {run['revision']}, " in shown


def test_of_what_leaves_early_the_part_of_the_ideal_is_shown_for_one_prompt_on_a_link() -> None:
    seconds = {"stock": [0.3, 0.6, 0.7], "layer": [0.4], "chunk": [0.5], "prefill": [0.35]}
    rate, tokens = 400, 4069  # whose KV takes a second
    found = [layerwise.row(rate, tokens, number, layerwise.Times(seconds, {"stock": 1})) for number in (1, 4)]
    assert found[0]["transfer"] == 1.0
    assert found[0]["share"] == {"layer": 0.75, "chunk": 0.37}, "of 1.35 s to 1.083 s"
    assert "share" not in found[1]
    _, _, first, second = layerwise.markdown({"rows": found}).splitlines()
    assert first == (
        "| 400 | 4,069 | 1 | 1000 ms | 600 ms | 400 ms (0.67) | 500 ms (0.83) | 350 ms | layer 75%, chunk 37% | 1 |"
    )
    assert second.startswith("| 400 | 4,069 | 4 |  | 600 ms |")


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_what_is_kept_is_small_and_says_how_it_was_made_but_no_path(file: Path) -> None:
    text = file.read_text("utf-8")
    result = json.loads(text)
    assert len(text) < 100 * 1024
    assert result["command"] == figures.command(result)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", result["date"])
    assert re.fullmatch(r"[0-9a-f]{7,}", result["revision"])
    assert result["machine"]
    assert re.findall(r'[" =(]/[a-z]+/[^"]*', text) == []


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--fault", "disconnects", "--compare", "--seconds", "600"],
        ["--load", "conversations:share=0.5,turns=3", "--fault", "kill-lmcache@8+4", "--rounds", "2"],
        ["--load", "bench:rate=0.5,num=9", "--patches", "kv-block-reaper", "--set", "VLLM_X=a b", "--seed", "3"],
        ["--fault", "kill-engine@5", "--fault", "lost-completions=0.5", "--fault", "slow-transfer"],
        ["--fault", "stop-engine@2.5+1", "--fault", "kill-engine@5", "--clients", "4"],
        ["--fault", "late-reads=3", "--compare", "--alone", "--setup", "0.1.0=26663bb"],
        ["--setup", "before=HEAD~1", "--setup", "0.1.0=26663bb", "--seconds", "10"],
    ],
)
def test_the_command_follows_from_the_result(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mocker: MockerFixture
) -> None:
    conduct = mocker.patch.object(command, "conduct", autospec=True, return_value={})
    mocker.patch.object(command, "conclude", autospec=True)
    start = ["vllm-livepatch", "lab", "lmcache", "--vllm", "0.29.0", "--lmcache", "0.5.6"]
    monkeypatch.setattr(sys, "argv", [*start, *words, "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        cli.main()
    _, options = conduct.call_args.args
    found = lab.described(options) | {"setups": dict.fromkeys(options.setups)}
    assert shlex.split(figures.command(json.loads(json.dumps(found)))) == [*start, *words]
    assert found["load"]["name"] in loads.KINDS
    assert found["faults"] == [asdict(fault) for fault in options.faults]


@pytest.mark.parametrize("words", [["--alone"], ["--fault", "disconnects"]])
def test_upstreams_benchmark_compares_no_answers_and_hangs_up_on_nobody(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["vllm-livepatch", "lab", "lmcache", "--load", "bench", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*start, *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert f"{words[-1]}: vllm bench serve" in capsys.readouterr().err


def test_the_settings_of_a_topology_are_shown_where_they_are_not_the_usual() -> None:
    described = topology.set_up(topology.load("pd-nixl"), ["lease=6"])
    found = lab.described(lab.Options(described, Path())) | {"setups": {"patched": {}}}
    assert shlex.split(figures.command(found))[-2:] == ["--with", "lease=6"]


def test_keeping_and_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"load": {"name": "storm", "seconds": 60.0, "clients": 12}, "rounds": 1, "seed": 1, "cores": 2}
    undated = result() | shape
    (tmp_path / "undated.json").write_text(json.dumps(undated))
    long = undated | {"date": "2026-11-24", "revision": "abc1234", "machine": "2 cores"}
    long["setups"]["stock"]["log_tail"] = ["File /place/of/x.py"]
    (tmp_path / "result.json").write_text(json.dumps(long))
    (tmp_path / "doc.md").write_text("a\n<!-- kept -->\n<!-- /kept -->\nb\n")

    def run(*words: str) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["figures", "--place", str(tmp_path / "kept"), *words])
        with pytest.raises(SystemExit) as ended:
            ending.end_with(figures.app, name="figures")
        return ended.value.code

    assert run("--keep", str(tmp_path / "result.json")) == 2
    assert run("--keep", str(tmp_path / "doc.md"), "--name", "x") == 2
    assert run("--keep", str(tmp_path / "undated.json"), "--name", "x") == 2
    assert run("--keep", str(tmp_path / "result.json"), "--name", "one", "--write", str(tmp_path / "doc.md")) == 0
    kept = (tmp_path / "kept" / "one.json").read_text()
    assert "/place/of" not in kept
    assert '"vllm-livepatch lab lmcache --vllm 1.0 --lmcache 2.0 --fault disconnects --compare"' in kept
    assert run("--picture", str(tmp_path / "none.png")) == 2
    assert run("--name", "one", "--picture", str(tmp_path / "one.png")) == 0
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "doc.md").read_text()
    assert " | HTTP 500: 3<br>ClientOSError: 2 | " in text
    assert "loaded again" not in text, "no setup has any"
    assert text.endswith("\nb\n")
