"""A fork and an import at once: each waits until the other is done, and who does both waits for nobody."""

from __future__ import annotations

import importlib
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

# By its name: it is no module in a patched process, and checked for types as what it is there.
finding: Any = importlib.import_module("vllm_livepatch.sitecustomize.finding")

ME = threading.get_ident()
OTHER = 7


class Hook:
    """A runtime that notes who counts as inside of it when it is asked; `pauses` are the waits, and who was then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[set[int]] = []
        self.pauses: list[set[int]] = []
        self.until = 2
        for name in ("inside", "forking", "finding"):
            monkeypatch.setattr(finding, name, set())
        monkeypatch.setattr(finding, "load_hook", lambda: SimpleNamespace(after=self.after))
        monkeypatch.setattr(finding, "sleep", self.sleep)

    def after(self, *arguments: Any) -> Any:
        self.seen.append(set(finding.inside))
        return arguments

    def sleep(self, seconds: float) -> None:
        self.pauses.append(set(finding.inside))
        if len(self.pauses) == self.until:
            finding.forking.discard(OTHER)
            finding.inside.discard(OTHER)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Hook:
    return Hook(monkeypatch)


def test_nobody_waits_where_nobody_forks(hook: Hook) -> None:
    assert finding.call_hook("after", 1) == (1,)
    assert (hook.seen, hook.pauses, finding.inside) == ([{ME}], [], set())


def test_an_import_waits_for_a_fork_and_does_not_hold_it_up(hook: Hook) -> None:
    finding.forking.add(OTHER)
    assert finding.call_hook("after", 1) == (1,)
    assert hook.pauses == [set(), set()]
    assert (hook.seen, finding.inside) == ([{ME}], set())


def test_an_import_within_an_import_waits_for_nobody(hook: Hook) -> None:
    finding.inside.add(ME)
    finding.forking.add(OTHER)
    finding.call_hook("after", 1)
    assert (hook.pauses, hook.seen, finding.inside) == ([], [{ME}], {ME})


def test_who_forks_may_import(hook: Hook) -> None:
    finding.forking.add(ME)
    finding.call_hook("after", 1)
    assert (hook.pauses, hook.seen) == ([], [{ME}])


def test_a_fork_waits_for_an_import_of_another_thread(hook: Hook) -> None:
    finding.inside.update({OTHER, ME})
    finding.before_fork()
    assert (len(hook.pauses), finding.forking) == (2, {ME})
    finding.after_fork()
    assert finding.forking == set()
    finding.inside.add(ME)  # it forks within an import
    finding.before_fork()
    assert len(hook.pauses) == 2


def test_waits_are_bounded(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "FORK_WAITS", 3)
    hook.until = 100
    finding.forking.add(OTHER)
    assert finding.call_hook("after", 1) == (1,)
    finding.inside.add(OTHER)
    finding.before_fork()
    assert len(hook.pauses) == 6


def test_in_the_child_only_the_thread_that_forked_is_left(hook: Hook) -> None:
    finding.inside.update({OTHER, ME})
    finding.forking.update({OTHER, ME})
    finding.finding.update({("a", OTHER), ("b", ME)})
    finding.after_fork_in_child()
    assert (finding.inside, finding.forking, finding.finding) == ({ME}, set(), {("b", ME)})


def test_forks_are_watched_from_the_first_target_on(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[dict[str, Any]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: registered.append(hooks))
    monkeypatch.setattr(finding, "fork_hooks", [])
    monkeypatch.setattr(finding, "TARGETS", {"engine.a": "watched"})
    monkeypatch.setattr(finding, "next_spec", lambda *search: None)
    assert finding.find_spec("engine.a", None, None) is None
    assert finding.find_spec("engine.a", None, None) is None
    (hooks,) = registered
    assert hooks == {
        "before": finding.before_fork,
        "after_in_parent": finding.after_fork,
        "after_in_child": finding.after_fork_in_child,
    }
    assert finding.finding == set()


def test_a_finder_behind_us_that_asks_all_finders_is_answered(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "TARGETS", {"engine.a": "watched"})
    monkeypatch.setattr(finding, "fork_hooks", [True])
    asked: list[Any] = []
    monkeypatch.setattr(finding, "next_spec", lambda *search: asked.append(finding.find_spec(*search)))
    finding.find_spec("engine.a", None, None)
    assert asked == [None]
