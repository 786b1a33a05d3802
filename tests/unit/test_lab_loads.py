"""How a load is said, what it asks for, and what becomes of upstream's benchmark."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_livepatch.tools import cli
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import bench, environments, lab, loads, model
from vllm_livepatch.tools.lab.bench import BenchServe, count
from vllm_livepatch.tools.lab.client import RequestFailed
from vllm_livepatch.tools.lab.faults import Fault
from vllm_livepatch.tools.lab.loads import Bench, Conversations, Storm, parse
from vllm_livepatch.tools.lab.setups import falling_into
from vllm_livepatch.tools.lab.supervisor import Part, PartFailed, Supervisor
from vllm_livepatch.tools.lab.tally import Tally

from tests.unit.test_lab_supervisor import gone, record

RESULT: dict[str, Any] = {
    "duration": 2.0,
    "completed": 2,
    "start_times": [100.0, 100.5, 101.0],
    "ttfts": [0.25, 0.5, 0.0],
    "itls": [[0.125, 0.125], [0.25], []],
    "generated_texts": ["a", "b", ""],
    "errors": ["", "", "Traceback ...\nTimeoutError: gave up\n"],
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("storm", Storm()),
        ("storm:", Storm()),
        ("storm:calm=0,share=1,stream=half", Storm(calm=0.0, share=1.0, stream="half")),
        ("conversations:turns=3,api=chat", Conversations(turns=3, api="chat")),
        ("bench:rate=2,num=50", Bench(rate=2.0, num=50)),
    ],
)
def test_a_load_is_a_name_and_options(text: str, expected: loads.Spec) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are storm, conversations, bench"),
        ("rain", "there are storm, conversations, bench"),
        ("bench:rate", "'rate' is no option of bench; there are rate, num, input, output, api"),
        ("bench:turns=3", "'turns=3' is no option of bench"),
        ("bench:rate=0", "rate is a number from 0.01 to 1000000"),
        ("bench:rate=nan", "rate is a number from"),
        ("bench:num=1.5", "num is a whole number from 1 to 1000000"),
        ("bench:num=0", "num is a whole number from 1"),
        ("bench:api=half", "api is one of completions, chat"),
        ("storm:share=1.1", "share is a number from 0.0 to 1"),
        ("storm:stops=2", "stops is a number from 0.0 to 1"),
        ("storm:share=-1", "share is a number from 0.0 to 1"),
        ("storm:stream=maybe", "stream is one of yes, no, half"),
        ("storm:tokens=2040", "2056 tokens are more than the model's 2048"),
        ("conversations:turns=50", "tokens are more than the model's 2048"),
    ],
)
def test_another_load_is_one_line_that_says_what_there_is(text: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(text)
    assert str(raised.value).startswith(f"--load {text}: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--load", "rain"],
        ["--load", "bench:rate=x"],
        ["--load", "bench", "--fault", "disconnects"],
        ["--rounds", "0"],
        ["--setup", "0.1.0"],
        ["--setup", "stock=HEAD"],
        ["--setup", "a/b=HEAD"],
    ],
)
def test_the_command_says_it_in_one_line_and_ends_with_2(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", "lab", "lmcache", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("vllm-livepatch: ")
    assert arguments[-2] in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RequestFailed("HTTP 500", "engine is dead"), 1, "lab: a request outside the load failed: HTTP 500: engine"),
        (asyncio.TimeoutError(), 1, "lab: a request outside the load failed: TimeoutError"),
        (environments.InstallationError("torch: no"), 1, "lab: torch: no"),
        (subprocess.CalledProcessError(2, ["python", "-m", "x"]), 2, ""),
        (subprocess.CalledProcessError(3, ["python", "-m", "x"]), 1, "lab: exit code 3 from x"),
        (asyncio.CancelledError(), 130, "lab: stopped"),
    ],
)
def test_a_run_that_fails_ends_with_its_code(
    error: BaseException,
    code: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def fails(options: lab.Options) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(lab, "run", fails)
    monkeypatch.setattr(sys, "argv", ["vllm-livepatch", "lab", "lmcache", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert capsys.readouterr().err.startswith(line)


def test_conversations_have_one_beginning_and_the_length_that_is_asked_for() -> None:
    spec = Conversations(conversations=3, turns=4, prefix=20, tokens=5)
    sessions = spec.sessions(1)
    assert [[len(turn.split()) for turn in session] for session in sessions] == [[25, 5, 5, 5]] * 3
    assert len({" ".join(session[0].split()[:20]) for session in sessions}) == 1
    assert len({session[0] for session in sessions}) == 3
    assert sessions == spec.sessions(1) != spec.sessions(2)
    assert loads.described(spec)["name"] == "conversations"


def test_faults_fall_into_the_round_of_their_moment_and_late_ones_into_the_last() -> None:
    early, late, later = (Fault("kill", "engine", at, 1.0) for at in (5.0, 35.0, 90.0))
    assert falling_into([early, late, later], 0, 30, last=False) == [early]
    assert falling_into([early, late, later], 30, 30, last=True) == [replace(late, at=5.0), replace(later, at=60.0)]


def test_the_benchmarks_requests_become_the_tally() -> None:
    tally = Tally(_before=3.0)
    count(RESULT, ["a", "other", "c"], tally)
    assert tally.events == [(1.5, "completed"), (2.25, "completed"), (3.0, "failed")]
    assert tally.mismatches == 1
    assert tally.errors == {"TimeoutError": 1}
    assert tally.examples == {"TimeoutError": "TimeoutError: gave up"}
    assert tally.first_tokens == [0.25, 0.5]
    assert tally.gaps == [0.125, 0.125, 0.25]


def test_the_benchmark_is_run_undisturbed_and_then_at_its_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in its place notes its words, says that it begins, and writes a result where it was told to."""
    result = {**RESULT, "errors": ["", "", ""]}
    program = (
        "import json, pathlib, sys\n"
        "words = sys.argv[1:]\n"
        "place = pathlib.Path(words[words.index('--result-dir') + 1])\n"
        "print('Starting main benchmark run...', flush=True)\n"
        f"(place / words[words.index('--result-filename') + 1]).write_text(json.dumps({result!r} | {{'words': words}}))\n"
    )
    monkeypatch.setattr(bench, "PROGRAM", program)
    tally = Tally()

    async def scene() -> dict[str, Any]:
        async with Supervisor(tmp_path) as parts:
            target = ("http://127.0.0.1:1", "tiny", tmp_path / "model")
            spec = Bench(rate=4, num=3, api="chat")
            work = BenchServe(parts, Path(sys.executable), {}, target, spec, 7, tally, [])
            assert await work.undisturbed() == 3
            assert not tally.going.is_set()
            await work.load(0)
            return work.figures()

    (figures,) = asyncio.run(scene())["bench"]
    assert figures == {"duration": 2.0, "completed": 2}
    assert (tally.count("completed"), tally.mismatches) == (3, 0)
    assert tally.going.is_set()
    first, second = (
        json.loads((tmp_path / f"{name}-result.json").read_text())["words"] for name in ("bench-undisturbed", "bench-1")
    )
    assert first[first.index("--max-concurrency") + 1] == "1"
    assert second[second.index("--request-rate") + 1] == "4"
    assert second[second.index("--endpoint") + 1] == "/v1/chat/completions"
    assert {"--ignore-eos", "--save-detailed"} < set(first) & set(second)
    assert record(tmp_path, "bench-1")["command"]


def test_a_program_that_fails_is_named_and_one_that_is_called_off_is_ended(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Supervisor(tmp_path) as parts:
            forever = "import signal\nprint('here', flush=True)\nsignal.pause()"
            run = asyncio.create_task(parts.run(Part("endless", (sys.executable, "-c", forever), {}, health="")))
            while not (tmp_path / "endless.log").is_file() or not (tmp_path / "endless.log").read_text():
                await asyncio.sleep(0.02)
            pid = int(str(record(tmp_path, "endless")["pid"]))
            assert psutil.pid_exists(pid)
            run.cancel()
            await asyncio.wait({run})
            assert gone(pid)
            await parts.run(Part("broken", (sys.executable, "-c", "raise SystemExit(3)"), {}, health=""))

    with pytest.raises(PartFailed, match="broken ended with exit code 3"):
        asyncio.run(scene())


def test_what_is_asked_for_at_length_fits_the_model() -> None:
    for kind in loads.KINDS.values():
        assert kind().longest() <= model.CONTEXT


def test_the_page_has_each_option_of_a_load_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs/lab.md").read_text("utf-8")
    table = page.partition("| of | option | default | is |\n")[2].partition("\n\n")[0].splitlines()[1:]
    found: dict[str, dict[str, str]] = {name: {} for name in loads.KINDS}
    of: list[str] = []
    for row in table:
        kinds, options, defaults, _ = row.strip("|").split("|")
        of = kinds.replace("`", "").replace(",", " ").split() or of
        named = options.replace("`", "").replace(",", " ").split()
        for kind in of:
            found[kind] |= dict(zip(named, defaults.replace(",", " ").split(), strict=True))
    usual = {name: loads.described(loads.parse(name)) for name in loads.KINDS}
    shown = {
        name: {option: f"{value:g}" if isinstance(value, float) else str(value) for option, value in options.items()}
        for name, options in usual.items()
    }
    assert found == {
        name: {key: value for key, value in options.items() if key != "name"} for name, options in shown.items()
    }
