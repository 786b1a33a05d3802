"""`status` of a fleet whose processes all report to one directory: a screen, an answer first, each file read once."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm_livepatch.tools.commands import monitor
from vllm_livepatch.tools.in_bundle import command, reading, status, summary

from tests.unit import fleet
from tests.unit.support import Ask, Cli, Done

NAMES = [f"patch-number-{number}" for number in range(25)]
OTHER = "sha256:" + "0" * 64
LATER = "0.2.0+sha256:000000000000"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def screen(done: Done, lines: int = 45, width: int = 200) -> list[str]:
    """The lines of an answer, which fit on a screen."""
    found = done.out.splitlines()
    assert len(found) <= lines
    assert max(map(len, found)) <= width
    return found


def test_the_summary_of_two_hundred_processes(ask: Ask, state: Path) -> None:
    for number in range(199):
        counters = {"calls": 2, "b": 1, "c": 1, "d": 1}
        fleet.leave(state, *(fleet.patch(name, counters=counters) for name in NAMES), host=f"node{number % 20}")
    failed = [fleet.patch(name, "failed", "raised") for name in NAMES]
    fleet.leave(state, *failed, host="node20", version="0.1.1", digest=None, packages={"vllm": "0.30.0"}, silent=1000.0)
    done = ask("--summary")
    assert (done.code, done.err) == (0, "")
    lines = screen(done)
    assert lines[:5] == [
        "200 processes on 21 hosts, 1 of them not heard of for three minutes",
        "not heard of: node20",
        "bundle 0.2.0+sha256:ab77c0deab77: 199 processes; vllm 0.29.0",
        "bundle 0.1.1: 1 process; vllm 0.30.0; on node20",
        "2 bundles are in use: a process keeps its own until it is restarted",
    ]
    row = next(line for line in lines if line.split()[0] == NAMES[3])
    assert row.split() == [NAMES[3], "199", "0", "0", "1", "calls", "398,", "b", "199,", "c", "199,", "..."]
    assert f"{NAMES[0]} is failed in 1 process, such as pid " in done.out
    assert lines[-1] == f"and {len(NAMES) - 8} more"
    found = json.loads(ask("--summary", "--json").out)
    assert (found["processes"], found["hosts"], found["unheard"]) == (200, 21, 1)
    assert found["unheard_hosts"] == ["node20"]
    assert found["bundles"]["0.1.1"] == {"processes": 1, "packages": ["vllm 0.30.0"], "hosts": ["node20"]}
    assert found["patches"][NAMES[0]]["counters"]["calls"] == 398
    assert found["troubles"][0]["processes"] == 1


def test_the_summary_of_a_fleet_of_which_half_is_silent_and_on_another_bundle(state: Path) -> None:
    """The names are cut off, with their number; `--json` has them all."""
    for number in range(60):
        fleet.leave(state, host=f"vllm-decode-7d9f8b6c5d-{number:05}", digest=f"sha256:{number:064}", silent=1000.0)
        fleet.leave(state, host=f"vllm-prefill-{number}", digest=OTHER.replace("0", "f"))
    fleet.leave(state, host="vllm-prefill-60", digest=OTHER.replace("0", "f"))
    found = summary.summary(status.read(state))
    lines = summary.summary_text(found).splitlines()
    assert max(map(len, lines)) <= 200
    assert lines[1].startswith("not heard of: vllm-decode-7d9f8b6c5d-00000, vllm-decode-7d9f8b6c5d-00001, ")
    shown = lines[1].count("vllm-decode-")
    assert lines[1].endswith(f" and {60 - shown} more (--json names all)")
    assert len(found["unheard_hosts"]) == 60
    assert next(line for line in lines if line.startswith("bundle")).startswith("bundle 0.2.0+sha256:ffffffffffff: 61 ")
    assert lines[-1] == "2 bundles are in use: a process keeps its own until it is restarted"


def test_more_bundles_than_a_screen_takes(state: Path) -> None:
    for number in range(30):
        fleet.leave(state, version=f"0.1.{number}", digest=None)
    lines = summary.summary_text(summary.summary(status.read(state))).splitlines()
    assert len([line for line in lines if line.startswith("bundle ")]) == 6
    assert lines[-1] == "30 bundles are in use, 24 of them not shown: a process keeps its own until it is restarted"


def test_many_processes_fit_one_screen_and_those_with_something_amiss_come_first(ask: Ask, state: Path) -> None:
    for number in range(200):
        fleet.leave(state, *map(fleet.patch, NAMES), host=f"node{number}", pid=7)
    broken = fleet.patch("around", "failed", "raised"), fleet.patch("other", "armed")
    fleet.leave(state, *broken, host="broken", pid=8, started="2026-11-23T06:00:00+00:00")
    fleet.leave(state, *map(fleet.patch, NAMES), host="stale", pid=9, digest=OTHER, silent=1000.0)
    done = ask()
    assert (done.code, done.err) == (0, "")
    lines = screen(done)
    assert lines[0] == "202 processes on 202 hosts, 1 of them not heard of for three minutes"
    assert lines[1].split()[:6] == ["host", "pid", "applied", "armed", "skipped", "failed"]
    assert lines[2].split()[:6] == ["stale", "9", "25", "0", "0", "0"]
    assert re.search(rf"  last heard of 1\d\d\d s ago; bundle {re.escape(LATER)}$", lines[2])
    assert lines[3].split() == ["broken", "8", "0", "1", "0", "1", "around", "failed", "(raised)"]
    assert lines[4].split()[:6] == ["node0", "7", "25", "0", "0", "0"]
    shown = len(lines) - 4
    assert lines[-2] == f"and {202 - shown} more processes, with something amiss in none of them"
    assert lines[-1] == "--all shows each process with its patches, --summary all processes together"
    every = ask("--all")
    assert (every.code, every.out.count("patch-number-3 ")) == (0, 201)
    assert len(json.loads(ask("--json").out)) == 202


@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (10, 60), (1, 60)])
def test_the_screen_may_be_smaller(state: Path, monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    for number in range(30):
        fleet.leave(state, fleet.patch("around", "failed", "raised"), host=f"node{number}")
    monkeypatch.setenv("LINES", str(rows))
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = summary.overview(status.read(state)).splitlines()
    assert len(lines) == max(rows - 1, summary.FEW + 4)
    assert max(map(len, lines)) <= columns
    assert lines[-2].startswith(f"and {30 - (len(lines) - 4)} more processes, with something amiss in ")


def test_few_processes_are_shown_with_their_patches(ask: Ask, state: Path) -> None:
    for number in range(summary.FEW):
        fleet.leave(state, fleet.patch("around"), host=f"node{number}")
    assert ask().out.count("around") == summary.FEW
    assert "--all" not in ask().out
    fleet.leave(state, fleet.patch("around"), host="another")
    assert "around" not in ask().out


def test_the_answer_comes_first_and_of_the_rest_only_what_fails(
    ask: Ask, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINES", "45")
    for number in range(100):
        fleet.leave(state, fleet.patch("around", version=3), fleet.patch("other"), host=f"node{number}")
    fleet.leave(state, fleet.patch("around", "armed", version=3), host="node7", digest=OTHER, silent=1000.0)
    silent = "; silent ones that do not count: 1"
    done = ask("--require", "around", "--require", "other@1")
    assert (done.code, done.out) == (1, f"no: 100 of 100 live processes lack around, other@1{silent}\n")
    assert len(done.lines) == 41
    assert done.lines[-1] == "vllm-livepatch: and 60 more, with --all"
    assert len(ask("--require", "other@1", "--all").lines) == 100
    done = ask("--require", "around@3")
    assert (done.code, done.out, done.err) == (0, f"yes: 100 of 100 live processes have around@3{silent}\n", "")
    fleet.leave(state, fleet.patch("around", "failed", "raised"), pid=77)
    done = ask("--require", "around")
    assert (done.code, done.out) == (1, f"no: 1 of 101 live processes lack around{silent}\n")
    assert done.lines == ["vllm-livepatch: around is failed in pid 77 on node1 (raised: why it is raised)"]
    done = ask("--require", "around", "--summary")  # what was asked for besides follows
    assert done.out.splitlines()[:2] == [
        f"no: 1 of 101 live processes lack around{silent}",
        "102 processes on 100 hosts, 1 of them not heard of for three minutes",
    ]
    done = ask("--digest", OTHER)
    assert (done.code, done.out) == (1, f"no: 101 of 101 live processes lack the bundle {OTHER}{silent}\n")


def test_the_answer_where_nobody_can_say(state: Path, cli: Cli) -> None:
    def answer(*words: str) -> str:
        done = cli("status", "--state-dir", str(state), "--require", "failed-loads", *words)
        assert done.code == 1
        return done.out

    state.mkdir()
    assert answer() == "no: failed-loads was asked for, and no live patched process is there\n"
    assert answer("--json") == "[]\n"  # a script reads JSON, and the exit code
    fleet.leave(state, fleet.patch("failed-loads", "armed"), silent=1000.0)
    assert answer() == "no: failed-loads was asked for, and no process was heard of lately\n"
    fleet.leave(state, fleet.patch("failed-loads", "armed"))
    done = cli("status", "--state-dir", str(state), "--require", "failed-loads")
    armed = " (armed in 1 of them, which have not imported its target)"
    assert done.out == f"yes: 1 of 1 live processes have failed-loads{armed}; silent ones that do not count: 1\n"


def test_silent_processes_are_forgotten_by_the_operators_word(ask: Ask, state: Path) -> None:
    heard = fleet.leave(state, fleet.patch("around"), host="node1")
    own = fleet.leave_own(state, fleet.patch("around"), silent=1000.0)  # seen to be alive
    gone = [fleet.leave(state, fleet.patch("around"), host=f"node{number}", silent=1000.0) for number in (1, 2, 3)]
    done = ask("--forget", "node1", "--json")
    assert (done.code, len(json.loads(done.out))) == (0, 4)
    removed = "vllm-livepatch: removed the reports of"
    assert done.err == f"{removed} 1 silent processes of node1; 1 other reports of it stay\n"
    assert set(state.iterdir()) == {heard, own, *gone[1:]}
    assert ask("--forget", "elsewhere").err == f"{removed} 0 silent processes of elsewhere\n"
    done = ask("--forget", "node2", "--forget", "*", "--summary")
    assert done.out.startswith("2 processes on 2 hosts\n")
    assert done.lines == [
        f"{removed} 1 silent processes of node2",
        f"{removed} 1 silent processes of *; 2 other reports of it stay",
    ]
    assert set(state.iterdir()) == {heard, own}
    assert ask("--require", "around").code == 0
    assert ask("--require", "aruond", "--forget", "*").code == 2


def test_a_report_that_cannot_be_removed_stays(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = fleet.leave(state, fleet.patch("around"), silent=1000.0)

    def refused(self: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refused)
    found = status.read(state)
    left, said = status.forget(found, ["*"])
    assert (left, said) == (found, ["removed the reports of 0 silent processes of *; 1 other reports of it stay"])
    assert file.exists()


FORMS: dict[str, tuple[command.Asked, dict[str, Any]]] = {
    "plain": (command.Asked(), {}),
    "all": (command.Asked(everything=True), {}),
    "summary": (command.Asked(summary=True), {}),
    "json": (command.Asked(as_json=True), {}),
    "require": (command.Asked(require=["failed-loads"]), {}),
    "forget": (command.Asked(forget=["*"]), {}),
    "prometheus": (command.Asked(), {"prometheus": Path("livepatch.prom")}),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_report_is_opened_and_parsed_once_and_each_text_looked_through_once(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The work grows with the number of reports, and not faster; redaction with the number of different texts."""
    monkeypatch.chdir(tmp_path)
    fleet.pods(tmp_path / "state", 10)
    work: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            work[name] += 1
            return function(*arguments, **options)

        return call

    class Decoder:
        decode = staticmethod(counted("parsed", reading._DECODER.decode))

    monkeypatch.setattr(reading, "_DECODER", Decoder)
    monkeypatch.setattr(status, "_read", counted("opened", status._read))
    for cached in (reading._sentence, reading._without_secrets):
        cached.cache_clear()
    asked, more = FORMS[form]
    monitor.run(tmp_path / "state", asked, **{"watch": False, "prometheus": None, "serve": None, "address": "", **more})
    assert work == {"opened": 30, "parsed": 30}
    reports = [json.loads(file.read_text()) for file in (tmp_path / "state").iterdir()]
    details = {patch["detail"] for one in reports for patch in one["patches"] if patch["detail"]}
    assert reading._sentence.cache_info().misses == len(details) > 10
    assert reading._without_secrets.cache_info().misses == len(fleet.PROGRAMS)
    assert "hush" not in capsys.readouterr().out


def test_a_process_has_at_most_twelve_series_besides_those_of_its_own_patches(
    state: Path, cli: Cli, tmp_path: Path
) -> None:
    fleet.pods(state, 3)
    file = tmp_path / "livepatch.prom"
    assert cli("status", "--state-dir", str(state), "--prometheus", str(file)).code == 0
    samples = [one for family in text_string_to_metric_families(file.read_text()) for one in family.samples]
    by_process: dict[tuple[str, str], list[str]] = {}
    shown: set[tuple[str, str, str]] = set()
    for sample in samples:
        if "pid" in sample.labels and "patch" not in sample.labels:
            by_process.setdefault((sample.labels["host"], sample.labels["pid"]), []).append(sample.name)
        elif sample.name == "livepatch_patch":
            shown.add((sample.labels["host"], sample.labels["pid"], sample.labels["patch"]))
    assert len(by_process) == 9
    assert max(map(len, by_process.values())) <= 12
    reports = [json.loads(file.read_text()) for file in state.iterdir()]
    applied = {
        (one["host"], str(one["pid"]), patch["name"])
        for one in reports
        for patch in one["patches"]
        if patch["state"] == "applied"
    }
    assert shown == applied != set()
