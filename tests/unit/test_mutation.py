"""The mutation tester: which tests a change of a line is given, what its outcome is, and what the page says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.tools.toml import tomllib
from vllm_livepatch.tools.upkeep import mutation, mutation_reach, mutation_report
from vllm_livepatch.tools.upkeep.mutation_copy import WORKER

MODULE = "room/module.py"
TEXT = dedent('''\
    """A module."""
    from __future__ import annotations

    LIMIT: int | None = 3


    def outer(number: int | None = 7) -> int | None:
        """Nothing but a text comes before."""
        def inner(): return number
        return inner()


    class Some:
        @property
        def value(self):
            if LIMIT:
                return 1
    ''')


def test_an_instrumented_module_says_which_functions_ran(tmp_path: Path) -> None:
    probes = tmp_path / "probes"
    probes.write_text("")
    text = mutation_reach.instrumented(TEXT, MODULE, str(probes))
    found: dict[str, Any] = {}
    exec(compile(text, "module", "exec"), found)
    assert probes.read_text() == ""
    assert (found["outer"](5), found["outer"].__doc__) == (5, "Nothing but a text comes before.")
    assert probes.read_text().split() == [f"{MODULE}:outer", f"{MODULE}:outer.inner"]
    assert found["Some"]().value == 1
    assert probes.read_text().split()[2:] == [f"{MODULE}:Some.value"]


def kept(seconds: float, *reached: str, passed: bool = True) -> dict[str, Any]:
    return {"seconds": seconds, "passed": passed, "reached": [f"{MODULE}:{name}" for name in reached]}


TESTS = {
    "a.py::slow": kept(9, "Some.value"),
    "a.py::quick[1]": kept(0.1, "Some.value"),
    "a.py::quick[2]": kept(0.2, "Some.value"),
    "a.py::failed": kept(0.1, "Some.value", passed=False),
    "a.py::other": kept(0.1, "outer"),
}


@pytest.mark.parametrize(
    ("line", "seconds", "expected"),
    [
        (16, 20, ["a.py::quick[1]", "a.py::quick[2]", "a.py::slow"]),
        # Of each kind first: the second case of a test comes after the first of a slow one.
        (16, 9.15, ["a.py::quick[1]", "a.py::slow"]),
        (16, 1, ["a.py::quick[1]", "a.py::quick[2]"]),
        (7, 20, ["a.py::other"]),  # a default
        (9, 20, []),  # a function that no test reached
        (4, 20, ["a.py::quick[1]", "a.py::quick[2]", "a.py::slow"]),  # a constant, by who uses it
        (1, 20, ["a.py::other", "a.py::quick[1]", "a.py::quick[2]", "a.py::slow"]),
    ],
)
def test_a_line_is_given_the_tests_that_execute_it(line: int, seconds: float, expected: list[str]) -> None:
    assert mutation_reach.reaching(TESTS, TEXT, MODULE, line, seconds) == expected


def test_the_quick_cases_of_a_test_all_have_their_turn() -> None:
    tests = {f"a.py::quick[{number}]": kept(0.01, "Some.value") for number in range(5)}
    found = mutation_reach.reaching({**tests, "a.py::slow": kept(1, "Some.value")}, TEXT, MODULE, 16, 1.01)
    assert found == sorted(tests)


def test_what_is_outside_of_functions_has_the_module_s_own_tests_too() -> None:
    """A dataclass's default: who reads it need not execute a function of the module."""
    own = "tests/unit/test_code.py::default"
    tests = {**TESTS, own: kept(0.01), "tests/unit/test_codes.py::other": kept(0.01)}
    assert own in mutation_reach.reaching(tests, TEXT, "folder/code.py", 1, 20)
    assert own not in mutation_reach.reaching(tests, TEXT, "folder/code.py", 16, 20)
    assert mutation_reach.reaching(tests, TEXT, "code/wrappers.py", 1, 20) == [own]


def test_annotations_that_nothing_evaluates_are_left_out() -> None:
    lines = TEXT.splitlines()
    found = [lines[first[0] - 1][first[1] : last[1]] for first, last in mutation.unevaluated(TEXT)]
    assert found == ["int | None"] * 3
    assert mutation.unevaluated(TEXT.replace("from __future__ import annotations", "")) == []


def mutant(number: int) -> mutation.Mutant:
    return mutation.Mutant("Some", number, 16, "if LIMIT:", f"if {number}:", f"changed {number}")


def test_a_sample_is_the_same_for_a_seed() -> None:
    possible = [mutant(number) for number in range(50)]
    first = mutation.drawn(possible, 10, 1)
    assert (len(first), first) == (10, mutation.drawn(possible, 10, 1))
    assert first != mutation.drawn(possible, 10, 2)
    assert mutation.drawn(possible, None, 1) == mutation.drawn(possible, 50, 1) == possible


def test_results_of_another_text_are_not_kept(tmp_path: Path) -> None:
    before = mutation.Kept(tmp_path, MODULE, TEXT, 2)
    before.add(mutant(1), "killed", "a.py::quick[1]")
    again = mutation.Kept(tmp_path, MODULE, TEXT, 2)
    assert list(again.found) == [mutant(1).key]
    assert mutation.Kept(tmp_path, MODULE, TEXT + "\n", 2).found == {}


def test_a_test_that_was_written_for_a_survivor_does_not_change_its_outcome(tmp_path: Path) -> None:
    kept = mutation.Kept(tmp_path, MODULE, TEXT, 2)
    kept.add(mutant(1), "survived", None)
    kept.add(mutant(1), "killed", "tests/unit/test_room.py::test_it", since=True)
    found = kept.found[mutant(1).key]
    assert (found["outcome"], found["by"], found["since"]) == ("survived", None, "tests/unit/test_room.py::test_it")
    page = mutation_report.page([{"module": MODULE, "date": "", "possible": 2, "mutants": [found]}], [])
    assert "| 2 | 1 | 0 | 0 | 0 | 1 | 0.0 % (0 to 79) |" in page
    assert "| `if 1:` | `test_room.py::test_it` |" in page


def test_a_draw_is_kept_with_its_mutants(tmp_path: Path) -> None:
    kept = mutation.Kept(tmp_path, MODULE, TEXT, 3)
    kept.add(mutant(1), "killed", None)
    kept.add(mutant(2), "survived", None, draw=2)
    kept.add(mutant(2), "survived", None, since=True)
    again = mutation.Kept(tmp_path, MODULE, TEXT, 3)
    assert [again.draw(mutant(number).key) for number in (1, 2, 3)] == [1, 2, None]


def test_a_draw_takes_nothing_of_another_and_is_gone_on_with(
    tmp_path: Path, mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` is ended and begun again: it goes on with the mutants that it drew."""
    asked: list[int] = []

    def run(self: Any, copies: Any, work: Any) -> None:
        for _ in range(2):
            module, one = work.get_nowait()
            asked.append(one.occurrence)
            self.kept[module].add(one, "survived", None, draw=self.config["draw"])

    monkeypatch.setattr(mutation, "mutants", lambda text, operators: [mutant(number) for number in range(12)])
    mocker.patch.object(mutation, "Copy")
    mocker.patch.object(mutation.Run, "record")
    mocker.patch.object(mutation.Run, "run", autospec=True, side_effect=run)

    def drawn(draw: int, **more: Any) -> list[int]:
        asked.clear()
        given: dict[str, Any] = {"again": False, "since": False, "seconds": None, "tests": None, "jobs": 1, **more}
        mutation.run(["sitecustomize/settings.py"], sample=4, seed=draw, draw=draw, place=tmp_path, **given)
        return list(asked)

    first, second = drawn(1) + drawn(1), drawn(2) + drawn(2)
    assert (len(first), len(second), len({*first, *second})) == (4, 4, 8)
    assert set(drawn(2, again=True)) < set(second), "of what survived, only this draw's"


class Tree:
    """Takes the place of a copy: a changed text's tests come to `answer`, but for one that fails without a change too."""

    def __init__(self, answer: dict[str, Any], unstable: str = "") -> None:
        self.answer, self.unstable = answer, unstable
        self.text, self.asked = TEXT, list[tuple[str, list[str], float]]()

    def write(self, module: str, text: str) -> None:
        self.text = text

    def run(self, tests: list[str], seconds: float) -> Any:
        self.asked.append((self.text, tests, seconds))
        if self.unstable in tests:
            return {"code": 1, "tests": {self.unstable: {"passed": False}}}
        return self.answer if self.text != TEXT else {"code": 0, "tests": {}}


PASSED = {name: {"passed": True, "seconds": 0.5} for name in TESTS}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"code": 0, "tests": PASSED}, ("survived", None)),
        ({"code": None, "tests": {}}, ("timeout", None)),
        ({"code": 4, "tests": {}}, ("killed", None)),  # pytest could not import it
        ({"code": 1, "tests": {**PASSED, "a.py::slow": {"passed": False}}}, ("killed", "a.py::slow")),
    ],
)
def test_the_outcome_of_a_mutant(answer: Any, expected: tuple[str, str | None]) -> None:
    tree: Any = Tree(answer, unstable="a.py::quick[1]")
    run = mutation.Run({"seconds": 20}, {MODULE: TEXT}, {})
    run.tests = TESTS
    assert run.outcome(tree, MODULE, mutant(1)) == expected
    assert tree.text == TEXT
    # What fails without the mutant too is not asked again; the limit is four times what the rest took, and 10 s.
    assert [text for text, tests, _ in tree.asked if "a.py::quick[1]" in tests] == ["changed 1", TEXT]
    assert tree.asked[2] == ("changed 1", ["-x", "a.py::quick[2]", "a.py::slow"], 4 * 9.2 + 10)


def test_what_survives_the_unit_tests_is_given_the_patchs_release_tests() -> None:
    release = "tests/releases/test_room.py::test_patched[0.33.0]"
    tree: Any = Tree({"code": 0, "tests": PASSED})
    run = mutation.Run({"seconds": 20, "releases": {"room": [release], "other": ["x"]}}, {MODULE: TEXT}, {})
    assert run.outcome(tree, MODULE, mutant(1)) == ("survived", None)  # no unit test reaches it
    assert [tests for _, tests, _ in tree.asked] == [["-x", release]]
    tree.answer = {"code": 1, "tests": {release: {"passed": False}}}
    assert run.outcome(tree, MODULE, mutant(1)) == ("killed", release)


def test_the_worker_runs_each_request_in_a_process_of_its_own(tmp_path: Path) -> None:
    probes = tmp_path / "probes"
    probes.write_text("")
    (tmp_path / "test_it.py").write_text(
        dedent(f"""\
        import subprocess, sys, threading

        def test_passes():
            subprocess.run([sys.executable, "-c", "open({str(probes)!r}, 'a').write('some.py:name')"], check=True)

        def test_fails():
            assert False

        def test_hangs():
            threading.Event().wait()
        """)
    )
    requests = [
        {"tests": ["test_it.py::test_passes", "test_it.py::test_fails"], "seconds": 60, "probes": str(probes)},
        {"tests": ["test_it.py::test_hangs"], "seconds": 1, "probes": None},
        {"tests": ["test_it.py::test_passes"], "seconds": 60, "probes": None},
    ]
    ended = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path / "result.json")],
        input="".join(json.dumps(one) + "\n" for one in requests),
        cwd=tmp_path,
        text=True,
        check=True,
        capture_output=True,
    )
    first, second, third = (json.loads(line) for line in ended.stdout.splitlines())
    assert first["code"] == 1
    assert [(one["passed"], one["reached"]) for one in first["tests"].values()] == [
        (True, ["some.py:name"]),
        (False, []),
    ]
    assert second == {"code": None, "tests": {}}
    assert third["code"] == 0


def test_the_page_has_figures_survivors_and_reasons() -> None:
    mutants = [
        {"operator": "X", "occurrence": number, "line": 3, "was": "a | b", "now": f"a & {number}", "outcome": outcome}
        for number, outcome in enumerate(["killed", "killed", "timeout", "survived", "survived"])
    ]
    measured = {"module": MODULE, "date": "2026-11-23", "possible": 9, "mutants": mutants}
    reasons = [{"module": MODULE, "was": "a | b", "now": ["a & 4"], "because": "b is a."}]
    page = mutation_report.page([measured], reasons)
    # 3 of the 4 that are not equivalent; Wilson's interval of 3 of 4.
    assert f"| `{MODULE}` | 9 | 5 | 2 | 1 | 1 | 1 | 75.0 % (30 to 95) |" in page
    survivors, _, equivalent = page.partition("## Survivors that do")
    assert "| `a \\| b` | `a & 3` |" in survivors
    assert "| `a \\| b` | `a & 4` | b is a. |" in equivalent
    assert "a & 3" not in equivalent
    whole = mutation_report.page([{**measured, "possible": 5}], reasons)
    assert f"| `{MODULE}` | 5 | all | 2 | 1 | 1 | 1 | 75.0 % |" in whole


def test_the_page_names_each_module_whose_code_changed_since(tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text('"""Text that may change."""\n\nx = 1\n', "utf-8")
    (tmp_path / "other.py").write_text("x = 2\n", "utf-8")
    digest = mutation.digest('"""The text that it was measured with."""\n\nx = 1\n')
    measured: list[dict[str, Any]] = [
        {"module": name, "date": "2026-11-23", "possible": 1, "mutants": [], "sha256": digest}
        for name in ("same.py", "other.py", "gone.py")
    ]
    since = mutation.changed(measured, tmp_path)
    assert since == ["gone.py", "other.py"]
    assert "their figures are of the code before:** `gone.py`, `other.py`." in mutation_report.page(
        measured, [], (), since
    )
    assert "changed since" not in mutation_report.page(measured, [])


def test_the_kept_page_names_them() -> None:
    """`python -m vllm_livepatch.tools.upkeep.mutation report` writes it anew."""
    kept = [json.loads(file.read_text("utf-8")) for file in sorted(mutation.KEPT.glob("*.json"))]
    names = ", ".join(f"`{name}`" for name in mutation.changed(kept, mutation.CHECKOUT))
    assert f"their figures are of the code before:** {names}.\n" in mutation.PAGE.read_text("utf-8") or not names


def test_the_page_has_each_draw_of_its_own() -> None:
    drawn = [(1, "killed"), (1, "survived"), (2, "killed"), (2, "timeout"), (2, "survived"), (2, "survived")]
    mutants = [
        {"operator": "X", "occurrence": number, "line": 3, "was": "a", "now": f"b{number}", "outcome": outcome}
        | ({"draw": draw} if draw > 1 else {})
        for number, (draw, outcome) in enumerate(drawn)
    ]
    measured = {"module": MODULE, "date": "2026-11-24", "possible": 6, "mutants": mutants}
    whole = {**measured, "module": "room/whole.py", "possible": 1, "mutants": mutants[:1]}
    draws = [{"folder": "room", "number": number, "what": f"seed {number}"} for number in (1, 2)]
    reasons = [{"module": MODULE, "was": "a", "now": ["b4"], "because": "It is."}]
    page = mutation_report.page([measured, whole], reasons, draws)
    # What was run whole is no draw's.
    assert "| `room/` | 1 | seed 1 | 2 | 1 | 0 | 0 | 1 | 50.0 % (9 to 91) |" in page
    assert "| `room/` | 2 | seed 2 | 4 | 1 | 1 | 1 | 1 | 66.7 % (21 to 94) |" in page
    assert f"| `{MODULE}:3`, draw 2 | `a` | `b5` |" in page
    assert "## Draws" not in mutation_report.page([measured], reasons)


def test_each_draw_of_a_page_is_shown_and_kept() -> None:
    draws = tomllib.loads(mutation.CONFIG.read_text("utf-8"))["draw"]
    kept = [json.loads(file.read_text("utf-8")) for file in mutation.KEPT.glob("*.json")]
    numbers = {
        (one["module"].partition("/")[0], mutant["draw"])
        for one in kept
        for mutant in one["mutants"]
        if "draw" in mutant
    }
    described = {(one["folder"], one["number"]) for one in draws}
    assert {folder for folder, _ in described} == {folder for folder, _ in numbers}
    assert numbers == {(folder, number) for folder, number in described if number > 1}


def test_the_kept_page_is_what_the_kept_results_say(tmp_path: Path) -> None:
    """`python -m vllm_livepatch.tools.upkeep.mutation report` writes it."""
    written = tmp_path / "page.md"
    mutation.report(mutation.KEPT, written)
    assert written.read_text("utf-8") == mutation.PAGE.read_text("utf-8")


def test_each_reason_is_of_a_survivor() -> None:
    reasons = tomllib.loads(mutation.CONFIG.read_text("utf-8")).get("equivalent", [])
    survived = {
        (one["module"], mutant["was"], mutant["now"])
        for one in (json.loads(file.read_text("utf-8")) for file in mutation.KEPT.glob("*.json"))
        for mutant in one["mutants"]
        if mutant["outcome"] == "survived"
    }
    assert {(one["module"], one["was"], now) for one in reasons for now in one["now"]} <= survived
