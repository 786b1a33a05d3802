"""`tests/gpu/run.py`: what it takes for wrong, and that what was measured is kept where something else fails.

It runs where a GPU is lent for minutes: here the drivers are faked, so that a fault of its own loses none of these.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pytest_mock import MockerFixture

from tests.gpu import run as gpu_run

RIGHT = {"hit": 192, "same": True, "untouched": True, "errors": []}
BEHIND_A_STEP = {"hit": 192, "same": True, "errors": []}
"""Right too: this case does not look at other blocks."""
WRONG = {
    "other bytes": {**RIGHT, "same": False},
    "others' blocks": {**RIGHT, "untouched": False},
    "a failed load": {**RIGHT, "errors": [40]},
    "nothing is loaded": {"hit": 0},
    "an error": {"error": "RuntimeError: no"},
}
COMPILED = "0.5.6 with its operations"
Answers = Mapping[tuple[str, str], Any]


def unpacked(place: Path, *releases: str, compiled: str | None = None) -> Path:
    """A folder with these releases of LMCache, and an operation of that name."""
    for release in releases:
        (place / f"lmcache-{release}.dist-info").mkdir(parents=True)
    (place / "lmcache").mkdir(parents=True, exist_ok=True)
    (place / "lmcache_cli-9.dist-info").mkdir()
    (place / "lmcache/c_ops.py").touch()
    if compiled is not None:
        (place / "lmcache" / compiled).touch()
    return place


@pytest.mark.parametrize("name", ["c_ops.cpython-312-x86_64-linux-gnu.so", "cuda_ops.abi3.so"])
def test_a_folder_is_of_one_release_with_its_operations_or_without(name: str, tmp_path: Path) -> None:
    assert gpu_run.release_in(unpacked(tmp_path / "without", "0.4.7")) == "0.4.7"
    assert gpu_run.release_in(unpacked(tmp_path / "with", "0.4.7", compiled=name)) == "0.4.7 with its operations"


@pytest.mark.parametrize("releases", [[], ["0.4.7", "0.5.6"]])
def test_a_folder_of_no_release_or_of_two_is_none(releases: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=rf"^{tmp_path}/one: no release of LMCache is unpacked there"):
        gpu_run.release_in(unpacked(tmp_path / "one", *releases))


class Servers:
    """Three installations of LMCache, whose servers come to `answers`, or are as they must be."""

    def __init__(self, tmp_path: Path, mocker: MockerFixture) -> None:
        self.folders = [
            unpacked(tmp_path / "old", "0.4.6"),
            unpacked(tmp_path / "new", "0.5.6"),
            unpacked(tmp_path / "compiled", "0.5.6", compiled="c_ops.abi3.so"),
        ]
        self.runs = gpu_run.Runs(tmp_path / "python", tmp_path / "bundle", self.folders)
        self.answers: dict[tuple[str, str], Any] = {
            ("0.4.6", "patched"): {"MLA": RIGHT, "K/V": RIGHT},
            ("0.4.6", "stock"): {"K/V": WRONG["an error"]},
            ("0.5.6", "patched"): {"MLA": RIGHT, "K/V": RIGHT, "behind a step": BEHIND_A_STEP},
            ("0.5.6", "stock"): {"MLA": WRONG["other bytes"], "K/V": RIGHT},
            (COMPILED, "stock"): {"MLA": RIGHT, "K/V": RIGHT},
        }
        self.driven = mocker.patch.object(gpu_run.Runs, "driver", autospec=True, side_effect=self.driver)

    def driver(
        self, runs: Any, name: str, *words: str, patched: Mapping[str, str] | None, lmcache: Path
    ) -> dict[str, Any]:
        answer = self.answers[gpu_run.release_in(lmcache), "stock" if patched is None else "patched"]
        if isinstance(answer, Exception):
            raise answer
        return {"cases": answer}


@pytest.fixture
def servers(tmp_path: Path, mocker: MockerFixture) -> Servers:
    return Servers(tmp_path, mocker)


def test_servers_are_right_with_the_bundle_or_their_operations_and_not_right_in_all_without(servers: Servers) -> None:
    came, wrong = gpu_run.block_server(servers.runs)
    assert wrong == []
    assert {(label, setup) for label, setups in came.items() for setup in setups} == servers.answers.keys()
    for (label, setup), cases in servers.answers.items():
        assert came[label][setup]["cases"] == cases
    assert came["0.5.6"]["patched"]["right"] == ["K/V", "MLA", "behind a step"]
    assert came["0.5.6"]["stock"]["right"] == ["K/V"]


def test_each_server_plays_every_case_but_one_without_an_operation_on_stock(servers: Servers) -> None:
    """To 0.4.6 each case of stock's waits in vain, for as long as the driver has patience."""
    gpu_run.block_server(servers.runs)
    old, new, compiled = servers.folders
    driven = [
        (call.args[1], call.args[2:], call.kwargs["patched"], call.kwargs["lmcache"])
        for call in servers.driven.call_args_list
    ]
    assert sorted(driven, key=repr) == sorted(
        [
            ("block_server.py", (), {}, old),
            ("block_server.py", ("K/V",), None, old),
            ("block_server.py", (), {}, new),
            ("block_server.py", (), None, new),
            ("block_server.py", (), None, compiled),
        ],
        key=repr,
    )


@pytest.mark.parametrize("label", ["0.4.6", "0.5.6", COMPILED])
@pytest.mark.parametrize("how", WRONG)
def test_a_case_that_is_not_right_where_all_must_be_is_said(label: str, how: str, servers: Servers) -> None:
    setup = "stock" if label == COMPILED else "patched"
    servers.answers[label, setup] = {"MLA": RIGHT, "K/V": WRONG[how]}
    came, wrong = gpu_run.block_server(servers.runs)
    assert wrong == [f"{label}, {setup}: right in MLA"]
    assert came[label][setup]["cases"]["K/V"] == WRONG[how]
    for none_right in ({"K/V": WRONG[how]}, {}):
        servers.answers[label, setup] = none_right
        assert gpu_run.block_server(servers.runs)[1] == [f"{label}, {setup}: right in no case"]


@pytest.mark.parametrize("label", ["0.4.6", "0.5.6"])
def test_stock_that_is_right_in_every_case_shows_no_fault(label: str, servers: Servers) -> None:
    servers.answers[label, "stock"] = {"MLA": RIGHT, "K/V": RIGHT}
    _, wrong = gpu_run.block_server(servers.runs)
    assert wrong == [f"{label}, stock: right in K/V, MLA"]


@pytest.mark.parametrize("failed", [("0.4.6", "stock"), ("0.5.6", "patched"), (COMPILED, "stock")])
def test_a_driver_that_fails_is_said_and_what_the_others_came_to_is_kept(
    failed: tuple[str, str], servers: Servers
) -> None:
    servers.answers[failed] = gpu_run.Failed("block_server.py: exit code 1\nwhy")
    came, wrong = gpu_run.block_server(servers.runs)
    assert wrong == [f"{', '.join(failed)}: block_server.py: exit code 1\nwhy"]
    kept = {(label, setup) for label, setups in came.items() for setup in setups}
    assert kept == servers.answers.keys() - {failed}


def test_where_no_release_was_given_nothing_was_tried(tmp_path: Path) -> None:
    assert gpu_run.block_server(gpu_run.Runs(tmp_path, tmp_path, [])) == ({}, ["no release was given (--lmcache)"])


# A driver's process

SAYS = """import json, os, sys
print("chatter")
print(json.dumps({"words": sys.argv[1:], **{name: os.environ.get(name) for name in ("PYTHONPATH", "LIVEPATCH", "X")}}))
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_run.Runs:
    """Of drivers that the test writes."""
    monkeypatch.setattr(gpu_run, "HERE", tmp_path)
    for name in ("PYTHONPATH", "LIVEPATCH", "X"):
        monkeypatch.delenv(name, raising=False)
    return gpu_run.Runs(Path(sys.executable), tmp_path / "bundle", [])


def test_stock_is_run_without_the_bundle_and_patched_with_it_and_nothing_else_for_its_faults(
    runs: gpu_run.Runs, tmp_path: Path
) -> None:
    (tmp_path / "one.py").write_text(SAYS, "utf-8")
    bundle, lmcache = str(tmp_path / "bundle"), tmp_path / "lmcache"
    stock: dict[str, Any] = {"words": ["a", "b"], "PYTHONPATH": "", "LIVEPATCH": None, "X": None}
    assert runs.driver("one.py", "a", "b", patched=None) == stock
    assert runs.driver("one.py", "a", "b", patched=None, lmcache=lmcache) == {**stock, "PYTHONPATH": str(lmcache)}
    patched = {**stock, "LIVEPATCH": "strict", "X": "on"}
    assert runs.driver("one.py", "a", "b", patched={"X": "on"}) == {**patched, "PYTHONPATH": bundle}
    both = runs.driver("one.py", "a", "b", patched={"X": "on"}, lmcache=lmcache)
    assert both == {**patched, "PYTHONPATH": f"{bundle}:{lmcache}"}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; print('{}'); sys.exit('it said why')", "one.py: exit code 1\nit said why\n"),
        ("", "one.py: exit code 0\n"),
    ],
)
def test_a_driver_that_ends_badly_or_says_nothing_has_failed(
    code: str, why: str, runs: gpu_run.Runs, tmp_path: Path
) -> None:
    (tmp_path / "one.py").write_text(code, "utf-8")
    with pytest.raises(gpu_run.Failed) as caught:
        runs.driver("one.py", patched=None)
    assert str(caught.value) == why


def test_a_driver_that_does_not_end_has_failed(
    runs: gpu_run.Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_run, "SECONDS", 0.1)
    (tmp_path / "one.py").write_text("import signal\nsignal.pause()\n", "utf-8")
    with pytest.raises(gpu_run.Failed, match=r"^one\.py: not over after 0\.1 s"):
        runs.driver("one.py", patched=None)


# All of it

Check = Callable[[gpu_run.Runs], tuple[dict[str, Any], list[str]]]


class Program:
    """`main` with these checks, on a GPU of that name; `file` has what it wrote."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mocker: MockerFixture) -> None:
        self.checks: dict[str, Check] = {}
        self.bundle, self.file = tmp_path / "bundle", tmp_path / "results.json"
        self.bundle.mkdir()
        (self.bundle / "manifest.json").touch()
        monkeypatch.setattr(gpu_run, "CHECKS", self.checks)
        mocker.patch.object(gpu_run, "gpu", autospec=True, return_value="A GPU, torch 1")
        self._set = monkeypatch.setattr

    def __call__(self, *words: str) -> int:
        options = ["--bundle", str(self.bundle), "--write", str(self.file)]
        self._set(sys, "argv", ["run.py", *options, *words])
        return gpu_run.main()

    def written(self) -> Any:
        return json.loads(self.file.read_text("utf-8"))["checks"]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mocker: MockerFixture) -> Program:
    return Program(tmp_path, monkeypatch, mocker)


def fails(runs: gpu_run.Runs) -> Any:
    raise gpu_run.Failed("one.py: exit code 1")


def test_results_are_written_although_a_check_fails_and_those_behind_it_run(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program.checks |= {
        "first": lambda runs: ({"a": 1}, []),
        "second": fails,
        "third": lambda runs: ({"c": 3}, ["not as it must be"]),
        "fourth": lambda runs: ({"d": 4}, []),
    }
    assert program() == 1
    assert program.written() == {
        "first": {"wrong": [], "found": {"a": 1}},
        "second": {"wrong": ["one.py: exit code 1"], "found": {}},
        "third": {"wrong": ["not as it must be"], "found": {"c": 3}},
        "fourth": {"wrong": [], "found": {"d": 4}},
    }
    assert "A GPU, torch 1" in json.loads(program.file.read_text("utf-8"))["machine"]
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if not line.startswith(" ")] == [
        "ok      first",
        "FAILED  second",
        "FAILED  third",
        "ok      fourth",
    ]
    assert "        one.py: exit code 1" in printed


def test_results_are_written_as_they_come(program: Program) -> None:
    """What was measured is there although a later check ends the program, or the machine goes."""

    def breaks(runs: gpu_run.Runs) -> Any:
        assert program.written() == {"first": {"wrong": [], "found": {"a": 1}}}
        raise KeyError("cases")

    program.checks |= {"first": lambda runs: ({"a": 1}, []), "second": breaks}
    with pytest.raises(KeyError, match="cases"):
        program()
    assert program.written() == {"first": {"wrong": [], "found": {"a": 1}}}


def test_where_all_is_as_it_must_be_the_exit_code_is_0_and_what_is_named_is_run(program: Program) -> None:
    program.checks |= {"first": fails, "second": lambda runs: ({}, [])}
    assert program("second") == 0
    assert [*program.written()] == ["second"]


def test_servers_are_run_where_releases_of_lmcache_are_given(program: Program, tmp_path: Path) -> None:
    program.checks |= {
        "mp-block-server": lambda runs: ({"releases": [*runs.lmcache]}, []),
        "rocm-pinned-allocator": lambda runs: ({}, []),
    }
    assert program() == 0
    assert [*program.written()] == ["rocm-pinned-allocator"]
    assert program("--lmcache", str(unpacked(tmp_path / "one", "0.5.6"))) == 0
    assert program.written()["mp-block-server"]["found"] == {"releases": ["0.5.6"]}
    assert [*program.written()] == ["mp-block-server", "rocm-pinned-allocator"]
