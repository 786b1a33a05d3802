"""`bench --long`: one command for every kept result that takes long, and what it says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pytest_mock import MockerFixture
from typer.testing import CliRunner
from vllm_livepatch.tools.bench import __main__ as bench
from vllm_livepatch.tools.bench import long
from vllm_livepatch.tools.cli import app
from vllm_livepatch.tools.errors import UserError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests/results"
SHORT = {f"figures/{name}" for name in bench.BENCHMARKS}
OF_ITS_OWN = ("gpu-servers", "scale", "unlisted")
"""Servers need releases of LMCache: docs/lab-results.md. `python -m tests.scale` is of the checkout, and takes hours.
What becomes of releases that are not listed is played one after the other: docs/compatibility.md."""


def test_every_kept_result_has_a_command() -> None:
    files = (file.relative_to(RESULTS).with_suffix("").as_posix() for file in RESULTS.rglob("*.json"))
    names = {name for name in files if not name.startswith(OF_ITS_OWN)}
    known = long.kept(ROOT, Path("work"))
    assert names == SHORT | known.keys(), "one that nobody can measure again, or a command for none"
    assert not SHORT & known.keys()


@pytest.mark.parametrize("name", long.kept(ROOT, Path("work")))
def test_its_commands_are_such_as_their_programs_take(name: str, tmp_path: Path) -> None:
    one = long.kept(ROOT, tmp_path, tmp_path / "python")[name]
    assert one.page.is_file()
    words = [word for command, _ in one.commands for word in command]
    assert "PYTHON" not in words
    assert (str(tmp_path / "python") in words) == one.on_gpu
    for command, _ in one.commands:
        assert command[0] == sys.executable
        module, *rest = command[2:] if command[1] == "-m" else command[1:]
        file = Path(module) if module.endswith(".py") else Path(str(getattr(find_spec(module), "origin", "")))
        if module.endswith(".cli"):  # the lab's have a test of their own
            continue
        text = (
            file.with_name("command.py").read_text("utf-8") if file.name == "__init__.py" else file.read_text("utf-8")
        )
        for option in (word for word in rest if word.startswith("--")):
            assert f'"{option}"' in text or f"    {option[2:]}: Annotated" in text, f"{module} has no {option}"


@pytest.mark.parametrize("name", [name for name, one in long.kept(ROOT, Path("work")).items() if not one.on_gpu])
def test_the_lab_takes_the_command_of_each_run(name: str, tmp_path: Path) -> None:
    (command, _), *_ = long.kept(ROOT, tmp_path)[name].commands
    if command[3] != "lab":
        return
    done = CliRunner().invoke(app, [*command[3:], "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "vllm" in done.output


def test_a_run_of_the_lab_is_kept_under_its_name_and_its_page_filled(tmp_path: Path) -> None:
    one = long.kept(ROOT, tmp_path)["lab-lease/late-0.32.0"]
    run, keep, fill = (command for command, _ in one.commands)
    assert run[:6] == (sys.executable, "-m", "vllm_livepatch.tools.cli", "lab", "pd-nixl", "--vllm")
    out = run[run.index("--out") + 1]
    assert keep[3:] == (
        *("--keep", f"{out}/result.json", "--name", "late-0.32.0"),
        *("--place", str(RESULTS / "lab-lease")),
    )
    assert fill[3:] == ("--place", str(RESULTS / "lab-lease"), "--write", str(ROOT / "docs/lab-results.md"))
    assert not one.on_gpu


def test_the_simulation_is_played_with_the_bundle_by_every_setup_but_stock(tmp_path: Path) -> None:
    (bundle, _), *played, (report, _) = long.kept(ROOT, tmp_path)["simulation"].commands
    assert bundle[3:] == ("generate", "--out", str(tmp_path / "bundle"))
    given = {words[words.index("--setup") + 1]: words for words, _ in played}
    assert {"stock", "patched"} <= given.keys()
    for setup, words in given.items():
        bundles = [words[at + 1] for at, word in enumerate(words) if word == "--bundle"]
        assert bundles == ([] if setup == "stock" else [str(tmp_path / "bundle")]), setup
    assert report[3:] == tuple(str(output) for _, output in played)
    assert len(set(report[3:])) == len(given)


def made(root: Path, commands: list[tuple[str, Path | None]], on_gpu: bool = False) -> long.Long:
    page = root / "page.md"
    page.write_text("old\nsame\n", encoding="utf-8")
    programs = tuple(((sys.executable, "-c", code), output) for code, output in commands)
    return long.Long(page, programs, on_gpu)


def test_what_changed_in_the_page_is_said_line_by_line(tmp_path: Path, mocker: MockerFixture) -> None:
    one = made(tmp_path, [("open('page.md', 'w').write('new\\nsame\\n')", None)])
    mocker.patch.object(long, "kept", return_value={"one": one})
    command, *changed = long.measure(tmp_path, ["one"])
    assert command.startswith("$ ")
    assert changed == ["one: - old", "one: + new"]


def test_where_a_command_fails_what_comes_after_it_does_not_run(tmp_path: Path, mocker: MockerFixture) -> None:
    one = made(tmp_path, [("raise SystemExit(1)", None), ("open('page.md', 'w').write('new')", None)])
    mocker.patch.object(long, "kept", return_value={"one": one})
    with pytest.raises(subprocess.CalledProcessError):
        list(long.measure(tmp_path, []))
    assert one.page.read_text("utf-8") == "old\nsame\n"


@pytest.mark.parametrize(
    ("code", "good"),
    [("print(1); raise SystemExit(1)", True), ("raise SystemExit(1)", False), ("print(1); raise SystemExit(2)", False)],
)
def test_a_world_that_goes_wrong_is_a_result_and_nothing_is_none(
    code: str, good: bool, tmp_path: Path, mocker: MockerFixture
) -> None:
    one = made(tmp_path, [(code, tmp_path / "out.json")])
    mocker.patch.object(long, "kept", return_value={"one": one})
    if good:
        list(long.measure(tmp_path, []))
        assert json.loads((tmp_path / "out.json").read_text("utf-8")) == 1
    else:
        with pytest.raises(subprocess.CalledProcessError):
            list(long.measure(tmp_path, []))


def test_what_was_measured_on_a_gpu_is_left_out_without_one_and_said(tmp_path: Path, mocker: MockerFixture) -> None:
    one = made(tmp_path, [("open('page.md', 'w').write('new')", None)], on_gpu=True)
    mocker.patch.object(long, "kept", return_value={"gpu": one})
    assert list(long.measure(tmp_path, [])) == ["left out, since --python names no interpreter for a GPU: gpu"]
    assert one.page.read_text("utf-8") == "old\nsame\n"
    with pytest.raises(UserError, match="gpu: measured on a GPU; --python PATH names an interpreter"):
        list(long.measure(tmp_path, ["gpu"]))
    list(long.measure(tmp_path, ["gpu"], tmp_path / "python"))
    assert one.page.read_text("utf-8") == "new"


def test_an_unknown_name_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], mocker: MockerFixture) -> None:
    mocker.patch.object(sys, "argv", ["bench", "--long", "lab-lease/none"])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench: there is no lab-lease/none; there are figures/idle_stepping, layerwise")


def test_a_command_that_fails_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mocker: MockerFixture
) -> None:
    mocker.patch.object(long, "kept", return_value={"one": made(tmp_path, [("raise SystemExit(7)", None)])})
    mocker.patch.object(bench, "CHECKOUT", tmp_path)
    (tmp_path / "tests/results/figures").mkdir(parents=True)
    mocker.patch.object(sys, "argv", ["bench", "--long"])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert end.value.code == 1
    assert "bench: exit code 7 from " in capsys.readouterr().err
