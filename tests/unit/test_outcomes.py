"""What people see of a process's patches: its line, what follows it, its report, and under strict its end."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import context, outcomes, overrides, wrapping
from vllm_livepatch.sitecustomize.decision import Decision, Environment, Patch
from vllm_livepatch.sitecustomize.greeting import QUIET_SECONDS
from vllm_livepatch.sitecustomize.patch_state import PatchState

from tests.unit import interpreters
from tests.unit.support import PATCHED, Sandbox

APPLY = Decision("needed", True, True, "needed", "")
REFUSED = Decision("drifted", False, True, "drifted", "somebody's edit")
OPTIONAL = Decision("needed", False, False, "optional", "")
FORCED = Decision("drifted", True, True, "forced", "is put on code that nobody verified")
UNNEEDED = Decision("drifted", False, False, "unneeded", "is not needed before")
UNVERIFIED = Decision("needed", True, True, "unverified", "is put on a release that nobody tested")
DIGEST = "sha256:0123456789abcdef"


class Ended(BaseException):
    """In the place of `os._exit`."""


class World:
    """A reporter of two patches, whose report and whose thread are doubles, and the lines that it writes."""

    def __init__(self, mocker: MockerFixture, mode: Any = "auto", digest: str | None = DIGEST, **of: Any) -> None:
        self.lines: list[str] = []
        self.now = 100.0
        mocker.patch.object(context, "line", self.lines.append)
        mocker.patch.object(context, "before_lines", [])
        mocker.patch.object(os, "_exit", side_effect=Ended)
        mocker.patch.object(time, "monotonic", side_effect=lambda: self.now)
        self.bypassing = mocker.patch.object(overrides, "bypassing", return_value=[])
        self.overtaken_by = mocker.patch.object(wrapping, "overtaken_by", return_value=None)
        self.one, self.other = (PatchState(Patch(name, "engine", "", (f"engine.{name}:f",), (), ())) for name in "ab")
        errors, notes = of.get("errors", ()), of.get("notes", ())
        environment = Environment(mode, {}, {}, tuple(errors), tuple(notes), keep=of.get("keep", False))
        patches: Any = SimpleNamespace(
            all=[self.one, self.other],
            environment=environment,
            settings={"a setting": "1"},
            packages={"engine": "1.0"},
            lock=threading.RLock(),
        )
        self.report = mocker.patch.object(outcomes, "ProcessReport").return_value
        self.report.error = None
        self.thread = mocker.patch.object(outcomes, "ReportThread").return_value
        self.reporter = outcomes.Reporter(patches, "1.2", {"digest": digest, "bundle": "/place"})
        made: Any = outcomes
        self.about = made.ProcessReport.call_args.args[1]
        self.look, self.write, self.end, self.due_in = made.ReportThread.call_args.args

    def decided(self, state: PatchState, decision: Decision) -> None:
        state.decision = decision
        if not decision.apply:
            state.settle("skipped", decision.reason, decision.detail)
        self.reporter.decided(state)

    def applied(self, state: PatchState) -> None:
        state.decision = APPLY
        step: Any = SimpleNamespace(target=f"engine.{state.patch.name}:f")
        state.applied = [step]
        state.settle("applied")


@pytest.fixture
def world(mocker: MockerFixture) -> World:
    return World(mocker)


@pytest.mark.parametrize(
    ("digest", "bundle"), [(DIGEST, "1.2+sha256:0123456789ab"), (None, "1.2"), ("", "1.2")], ids=["whole", "none", "''"]
)
def test_the_line_names_the_bundle_by_its_version_and_digest(
    mocker: MockerFixture, digest: str | None, bundle: str
) -> None:
    world = World(mocker, digest=digest)
    world.decided(world.one, APPLY)
    world.reporter.close()
    (line,) = world.lines
    assert f" bundle={bundle}; LIVEPATCH=off turns it off" in line
    assert world.about == {"digest": digest, "bundle": "/place", "version": "1.2", "settings": {"a setting": "1"}}


def test_the_first_decision_begins_the_line_and_the_report(world: World) -> None:
    world.decided(world.one, APPLY)
    world.thread.flush.assert_called_once_with(1.0)
    assert world.lines == []
    world.decided(world.other, OPTIONAL)
    world.thread.flush.assert_called_once()
    world.report.late.assert_not_called()
    assert world.lines == [], "it is said when it is known what came of them"


def test_what_is_wrong_with_the_settings_follows_the_line_once(mocker: MockerFixture) -> None:
    world = World(mocker, errors=["a value that cannot be"], notes=["a name that means nothing"])
    world.decided(world.one, APPLY)
    world.decided(world.other, APPLY)
    world.reporter.close()
    assert world.lines[1:] == ["a value that cannot be", "a name that means nothing"]


@pytest.mark.parametrize("of", [{"errors": ["one"], "notes": ["two"]}, {"notes": ["one; two"]}])
def test_under_strict_it_ends_the_process(mocker: MockerFixture, of: dict[str, Any]) -> None:
    world = World(mocker, "strict", **of)
    with pytest.raises(Ended):
        world.decided(world.one, APPLY)
    assert world.lines[-1] == "LIVEPATCH=strict: one; two"
    assert len(world.lines) == 2


def test_a_file_system_that_hangs_is_reported_and_keeps_no_line_back(world: World) -> None:
    world.thread.flush.return_value = False
    world.decided(world.one, APPLY)
    world.report.late.assert_called_once_with()
    assert len(world.lines) == 1


def test_where_there_is_no_thread_the_exit_says_the_line(world: World) -> None:
    """At the first decision nothing is applied yet, and the file system is not to blame."""
    world.thread.flush.return_value = world.thread.is_there.return_value = False
    world.decided(world.one, APPLY)
    assert world.lines == []
    world.applied(world.one)
    world.reporter.close()
    world.report.late.assert_not_called()
    (line,) = world.lines
    assert " applied=a " in line


@pytest.mark.parametrize("error", [None, "no report in /place: No space left on device"])
def test_a_report_that_cannot_be_left_is_in_the_line(world: World, error: str | None) -> None:
    world.report.error = error
    world.decided(world.one, APPLY)
    world.reporter.about_to_fork()
    (line,) = world.lines
    assert line.endswith(f"; LIVEPATCH=off turns it off{'; ' + error if error else ''}")
    world.thread.about_to_fork.assert_called_once_with()


@pytest.mark.parametrize(
    ("decision", "logged"),
    [
        (APPLY, []),
        (OPTIONAL, []),
        (FORCED, ["a: is put on code that nobody verified"]),
        (UNVERIFIED, ["a: is put on a release that nobody tested"]),
        (UNNEEDED, ["a: is not needed before"]),
        (REFUSED, ["a is not applied (drifted): somebody's edit"]),
    ],
)
def test_what_follows_the_line(world: World, decision: Decision, logged: list[str]) -> None:
    world.decided(world.one, decision)
    world.reporter.close()
    assert world.lines[1:] == logged


def test_under_strict_a_patch_that_is_wanted_and_refused_ends_the_process(mocker: MockerFixture) -> None:
    world = World(mocker, "strict")
    world.decided(world.one, OPTIONAL)
    assert world.lines == []
    with pytest.raises(Ended):
        world.decided(world.other, REFUSED)
    assert "failed=b" in world.lines[0]
    assert world.lines[1:] == ["LIVEPATCH=strict: b is not applied (drifted): somebody's edit"]


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_a_patch_that_stands_aside_ends_nothing(mocker: MockerFixture, mode: str) -> None:
    world = World(mocker, mode)
    world.decided(world.one, APPLY)
    world.one.settle("failed", "raised", "an error of its own")
    world.reporter.no_longer_applied(world.one)
    assert world.lines[1:] == ["a is no longer applied (raised): an error of its own"]


def test_an_import_puts_the_line_off_and_the_report_follows_at_once(world: World) -> None:
    world.applied(world.one)
    world.reporter.decided(world.one)
    world.now += 3
    world.reporter.imported()
    world.thread.soon.assert_called_once_with(0.0)
    assert world.due_in() == QUIET_SECONDS
    world.now += QUIET_SECONDS - 1
    world.look()
    assert world.lines == []
    world.now += 2
    world.look()
    world.look()
    assert len(world.lines) == 1


def test_a_report_has_all_patches_once_one_was_decided_on(world: World) -> None:
    assert world.look() is None
    world.decided(world.one, OPTIONAL)
    assert [(one["name"], one["state"]) for one in world.look()] == [("a", "skipped"), ("b", "armed")]
    world.write(["content"])
    world.report.write.assert_called_once_with({"engine": "1.0"}, ["content"])


def test_what_somebody_replaced_is_logged_once_and_failed(world: World) -> None:
    world.applied(world.one)
    world.applied(world.other)
    world.reporter.decided(world.one)
    of = {id(world.other.applied[0]): "somebody's"}
    world.overtaken_by.side_effect = lambda step: of.get(id(step))
    states = [(one["state"], one["reason"]) for one in world.look()]
    assert states == [("applied", None), ("failed", "overwritten")]
    logged = "b is no longer applied (overwritten): engine.b:f was replaced later by somebody's"
    assert world.lines[1:] == [logged]
    world.look()
    assert world.lines[1:] == [logged]


def test_each_class_that_bypasses_a_target_is_logged_once(world: World) -> None:
    world.applied(world.one)
    world.reporter.decided(world.one)
    found = world.bypassing
    found.return_value = ["A overrides it"]
    (first, _) = world.look()
    assert (first["state"], first["reason"], first["detail"]) == ("applied", "bypassed", "A overrides it")
    found.return_value = ["A overrides it", "B overrides it"]
    (first, _) = world.look()
    assert first["detail"] == "A overrides it; B overrides it"
    assert world.lines[1:] == ["a is bypassed: A overrides it", "a is bypassed: B overrides it"]
    found.return_value = []
    (first, _) = world.look()
    assert first["reason"] == "bypassed", "a class that is gone has bypassed it"
    assert len(world.lines) == 3


def test_what_changed_while_it_was_looked_at_is_looked_at_again_later(world: World) -> None:
    world.applied(world.one)
    world.reporter.decided(world.one)

    def unapplied(step: Any) -> str:
        world.one.settle("failed", "missing", "taken back meanwhile")
        return "the release's own"

    world.bypassing.return_value = ["A overrides it"]
    world.overtaken_by.side_effect = unapplied
    (first, _) = world.look()
    assert (first["state"], first["reason"], first["detail"]) == ("failed", "missing", "taken back meanwhile")
    assert world.lines == []


@pytest.mark.parametrize(("keep", "content"), [(False, ["content"]), (True, ["content"]), (True, None), (False, None)])
def test_the_end_of_a_process(mocker: MockerFixture, keep: bool, content: Any) -> None:
    """Its report goes with it, or has what came last."""
    world = World(mocker, keep=keep)
    world.decided(world.one, APPLY)
    world.end(content)
    assert len(world.lines) == 1
    assert world.report.remove.called is not keep
    assert world.report.write.called is (keep and content is not None)


def test_a_forked_child_has_a_report_of_its_own(world: World) -> None:
    world.reporter.forked_child()
    world.report.begin.assert_called_once_with()
    world.thread.forked_child.assert_called_once_with()


def test_behind_a_patch_that_is_not_applied_others_are_looked_at(world: World) -> None:
    world.decided(world.one, OPTIONAL)
    world.applied(world.other)
    world.overtaken_by.return_value = "somebody's"
    assert [one["state"] for one in world.look()] == ["skipped", "failed"]


def test_behind_a_patch_that_changed_meanwhile_others_are_looked_at(world: World) -> None:
    world.applied(world.one)
    world.applied(world.other)
    world.reporter.decided(world.one)

    def looked_up(step: Any) -> str:
        if step is world.one.applied[0]:
            world.one.settle("failed", "missing", "taken back meanwhile")
        return "somebody's"

    world.overtaken_by.side_effect = looked_up
    assert [one["reason"] for one in world.look()] == ["missing", "overwritten"]


def test_a_line_that_is_due_is_written_with_the_next_look(world: World) -> None:
    world.applied(world.one)
    world.reporter.decided(world.one)
    world.now += QUIET_SECONDS - 0.5
    world.look()
    assert world.lines == []
    world.now += 1.0  # due half a second ago
    world.look()
    assert len(world.lines) == 1


@pytest.mark.parametrize("executed", [True, False])
def test_what_a_reload_has_put_there_is_not_somebody_s(
    world: World, monkeypatch: pytest.MonkeyPatch, executed: bool
) -> None:
    """While it executes the module, its lock is held; at its end the patch is applied anew."""
    owner = 7 if executed else None
    locks = {"engine.a": lambda: SimpleNamespace(owner=owner), "engine.b": lambda: None}
    monkeypatch.setattr(sys.modules["_frozen_importlib"], "_module_locks", locks)
    world.applied(world.one)
    world.applied(world.other)
    world.reporter.decided(world.one)
    world.overtaken_by.return_value = "the module's own"
    assert [one["state"] for one in world.look()] == ["applied" if executed else "failed", "failed"]


RELOADS = """
import importlib, json, os, sys, threading, time
import fakeengine.scheduler
old = fakeengine.scheduler.Scheduler()
place = os.environ["LIVEPATCH_STATE_DIR"]

def looked():  # the next report, with what is counted now, is of a look while the module is executed
    sys.looked = None
    old.step(1)
    while not any(json.load(open(f"{place}/{name}"))["patches"][0]["counters"] == {"calls": 1}
                  for name in os.listdir(place) if name.endswith(".json")):
        time.sleep(0.01)

sys.looked = looked
again = importlib.reload(fakeengine.scheduler)
print(sys.looked, again.Scheduler().step(7))
"""


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_a_look_in_the_middle_of_a_reload(sandbox: Sandbox, version: str) -> None:
    file = sandbox.site / "fakeengine/scheduler.py"
    file.write_text(f"{file.read_text('utf-8')}\nimport sys\ngetattr(sys, 'looked', lambda: None)()\n", "utf-8")
    sandbox.patch()
    sandbox.generate()
    done = sandbox.python(RELOADS, python=str(interpreters.find(version)))
    assert (done.code, done.out, done.others) == (0, f"None {PATCHED}", []), done.err
    assert sandbox.reported()["state"] == "applied"


def test_what_fails_while_the_rest_is_decided_on_is_named_with_it(mocker: MockerFixture) -> None:
    """And nothing else is said then; an error of its own keeps strict from nothing."""
    world = World(mocker, "strict")

    def rest() -> None:
        world.decided(world.other, REFUSED)
        world.decided(world.other, UNVERIFIED)
        raise ValueError

    world.reporter.decide_rest = rest
    with pytest.raises(Ended):
        world.decided(world.one, REFUSED)
    assert world.lines[1:] == [
        f"LIVEPATCH=strict: {name} is not applied (drifted): somebody's edit" for name in ("a", "b")
    ]


def test_where_all_is_off_by_a_word_that_means_nothing_none_is_armed(mocker: MockerFixture) -> None:
    world = World(mocker, "off")
    assert [(state.state, state.reason) for state in (world.one, world.other)] == [("skipped", "off")] * 2
