"""What a patch's code is given: lines on stderr, and a method as the release's own object binds it."""

from __future__ import annotations

import io
import sys
import time
from functools import partialmethod
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import context, guard
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.sitecustomize.decision import Decision, Patch, Variant
from vllm_livepatch.sitecustomize.patch_state import PatchState


def made() -> PatchContext:
    return PatchContext("one", {}, {}, lambda: None)


def test_one_line_of_a_kind_in_thirty_seconds_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = [100.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(context, "to_stderr", lines.append)
    livepatch = made()
    for _ in range(4):
        livepatch.say("late", "it came late")
    livepatch.say("lost", "another kind")
    assert lines == ["one: it came late", "one: another kind"]
    now[0] += 29.9
    livepatch.say("late", "it came late")
    assert len(lines) == 2
    now[0] += 0.1
    livepatch.say("late", "again")
    now[0] += 30.0
    livepatch.say("late", "and again")
    assert lines[2:] == ["one: again (4 more like it since the last line)", "one: and again"]


def test_a_count_adds_up_and_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[int] = []
    livepatch = PatchContext("one", {}, {}, lambda: changes.append(1))
    livepatch.count("kind")
    livepatch.count("kind", 3)
    livepatch.count("other", 0)
    assert (livepatch.counters, len(changes)) == ({"kind": 4, "other": 0}, 3)


class Engine:
    def step(self, *numbers: int) -> tuple[int, ...]:
        return numbers

    plain = step
    bound = partialmethod(step, 1)  # no function, and not to be called but through an instance


def test_a_line_stays_one_whatever_a_client_has_named_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    context.line("request a\nvllm-livepatch: LIVEPATCH=off\x1b[2J\x85\u2028é: refused")
    shown = r"request a\nvllm-livepatch: LIVEPATCH=off\x1b[2J\x85\u2028é: refused"
    assert capsys.readouterr().err == f"vllm-livepatch: {shown}\n"


@pytest.mark.parametrize(("name", "expected"), [("plain", (2,)), ("bound", (1, 2))])
def test_a_wrapper_calls_what_the_release_would_have_called(name: str, expected: tuple[int, ...]) -> None:
    seen: list[Any] = []

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append((instance, args))
        return wrapped(*args, **kwargs)

    engine = Engine()
    method = guard.of_method(vars(Engine)[name], wrapper, made(), "engine:Engine.step")
    assert method(engine, 2) == expected
    assert seen == [(engine, (2,))]


PATCH = Patch("one", "engine", "", ("engine.a:f",), (), (Variant({"engine.a:f": "f"}, ("1.0",)),))


@pytest.mark.parametrize(
    ("state", "wanted", "apply", "missing"),
    [
        ("skipped", True, False, True),
        ("skipped", False, False, False),  # off, or not needed here
        ("failed", True, True, True),
        ("applied", True, True, False),
    ],
)
def test_what_is_wanted_and_not_applied_is_missing(state: str, wanted: bool, apply: bool, missing: bool) -> None:
    patch = PatchState(PATCH)
    assert not patch.missing
    patch.decision = Decision("needed", apply, wanted, "needed", "", None)
    patch.settle(state)
    assert patch.missing is missing


def test_a_patch_that_nobody_asked_for_by_name() -> None:
    assert not made().asked
    assert not PatchContext("a", {}, {}, lambda: None).asked


class Written(io.StringIO):
    """A stderr of somebody's own, without a file."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def fileno(self) -> int:
        raise self.error


@pytest.mark.parametrize("error", [OSError(), ValueError()])
def test_a_stderr_without_a_file_gets_its_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    stderr = Written(error)
    monkeypatch.setattr(sys, "stderr", stderr)
    context.line("a line")
    assert stderr.getvalue() == "vllm-livepatch: a line\n"


def test_a_process_without_a_stderr_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    context.line("nobody hears it")
