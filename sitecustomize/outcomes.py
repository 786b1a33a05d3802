"""What people see of this process's patches: its report, its lines on stderr, and under strict its end."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from . import overrides, vllm_plugin, wrapping
from .context import to_stderr
from .decision import module_of
from .greeting import Greeting, Outcome
from .patch_state import PatchState, PatchStates
from .relied_on import RELIED_ON
from .report import ProcessReport
from .report_thread import ReportThread

EXIT_STRICT = 78  # EX_CONFIG
_FIRST_SECONDS = 1.0
"""What the import of the first target waits for the first report, at most: its one line says what is wrong with it."""


class Reporter:
    """Tells of the patches of one process what others find out about them."""

    def __init__(self, patches: PatchStates, version: str, bundle: Mapping[str, Any]) -> None:
        """`bundle` is what the report says of it besides its version."""
        self._patches = patches
        about = {**bundle, "version": version, "settings": patches.settings}
        self._report = ProcessReport(os.environ, about)
        self._begun = False  # the first patch was decided on
        self.before_look: Callable[[], None] = lambda: None  # called before each report, by the thread that writes it
        self._ending: list[str] = []  # why strict ends this process
        self.decide_rest: Callable[[], None] = lambda: None  # on the patches that were not decided on yet
        if patches.environment.mode == "off":  # by a value that means nothing: none waits for its target
            for state in patches.all:
                state.settle("skipped", "off", "LIVEPATCH is off")
        name = f"{version}+{about['digest'][: len('sha256:') + 12]}" if about["digest"] else version
        self._greeting = Greeting(version, name, self._outcomes, self._trouble)
        self._thread = ReportThread(self._look_over, self._write, self._end, self._greeting.due_in)

    def decided(self, state: PatchState) -> None:
        """A patch was decided on: the first one begins the process's line."""
        decision = state.decision
        assert decision is not None
        with self._patches.lock:  # two threads may import two targets at once
            first, self._begun = not self._begun, True
        wrong = self._begin() if first else []
        if decision.reason in ("unverified", "forced", "unneeded") and not self._ending:
            self._greeting.behind(f"{state.patch.name}: {decision.detail}")
        refused = {_not_applied(state): state} if decision.wanted and not decision.apply else {}
        self._say_wrong({**dict.fromkeys(wrong), **refused})

    def not_applied(self, *states: PatchState, importing: bool = True) -> None:
        """Write a line for each patch that is wanted and not applied; under strict, while `importing`, and end."""
        self._say_wrong({_not_applied(state): state for state in states}, importing)

    def _say_wrong(self, messages: Mapping[str, PatchState | None], importing: bool = True) -> None:
        """Each of these, with the patch that it is about."""
        ends = self._patches.environment.ends
        fatal = [
            message for message, state in messages.items() if importing and ends(None if state is None else state.patch)
        ]
        for message, state in messages.items():
            if message not in fatal:
                # One that was refused may be applied after all before the process's line is due.
                holds = None if state is None else functools.partial(getattr, state, "missing")
                self._greeting.behind(message, holds)
        if fatal:  # if it is ending already, that says these too
            self._end_process(fatal)

    def no_longer_applied(self, state: PatchState) -> None:
        """Printed, and no more: what serves already is not ended, not even under strict."""
        to_stderr(f"{state.patch.name} is no longer applied ({state.reason}): {state.detail}")

    def imported(self) -> None:
        """A target was imported: the report follows at once, the process's line once no more of them come."""
        self._greeting.wait()
        self._thread.tell_multiprocessing()
        self.soon(0.0)

    def soon(self, seconds: float) -> None:
        """Have the report written in so many seconds at the latest, and wait for nothing."""
        self._thread.soon(seconds)

    def close(self) -> None:
        """At the process's exit."""
        self._thread.close()
        self._greeting.say()  # where a file system that hangs keeps the thread that would

    def about_to_fork(self) -> None:
        self._greeting.say()  # the thread that would say it ends here
        self._thread.about_to_fork()

    def forked_child(self) -> None:
        self._greeting.forked_child()
        self._report.begin()
        self._thread.forked_child()

    # The lines on stderr

    def _begin(self) -> list[str]:
        """What is wrong with the settings: a line each, under strict one in all."""
        self._greeting.begin(self._patches.packages)
        if not self._thread.flush(_FIRST_SECONDS) and self._thread.is_there():
            self._report.late()
            self._greeting.say()  # nobody would come to it later; where there is no thread, the exit does
        environment = self._patches.environment
        troubles = [*environment.errors, *environment.notes, *bundles_beside()]
        return ["; ".join(troubles)] if troubles and environment.mode == "strict" else troubles

    def _end_process(self, why: list[str]) -> None:
        """End it, for these reasons and those that the patches have which were not decided on yet.

        A start that named one of them at a time would be tried as often as there are some.
        """
        first = not self._ending
        self._ending += why
        if first:
            try:
                self.decide_rest()
            finally:  # whatever that comes to
                self._greeting.say()
                strict = self._patches.environment.mode == "strict"
                end_process(*self._ending, because="LIVEPATCH=strict" if strict else "must = true")

    def _outcomes(self) -> list[Outcome]:
        """What came of each patch so far."""
        with self._patches.lock:
            return [
                Outcome(
                    state.patch.versioned,
                    state.state,
                    state.missing,
                    state.decision is not None and state.decision.verdict == "proven",
                )
                for state in self._patches.all
            ]

    def _trouble(self) -> str:
        return f"; {self._report.error}" if self._report.error else ""

    # The report

    def _look_over(self) -> list[dict[str, Any]] | None:
        """Look every applied target up again: what the report says of the patches, None where there is none yet."""
        self.before_look()
        lost: list[PatchState] = []
        bypassed: list[str] = []
        for state in self._patches.all:
            steps = state.applied
            if state.state != "applied":
                continue
            found = overrides.bypassing(steps)
            overtaken = ((step, _overtaken_by(step)) for step in steps)
            replaced = next(((step, by) for step, by in overtaken if by is not None), None)
            relied_on = None if state.relied_on is None else state.relied_on.replaced(self._patches.wrappers())
            with self._patches.lock:
                if state.applied is not steps or state.state != "applied":
                    continue  # what was looked up is no longer so
                if replaced is not None and _is_being_executed(module_of(replaced[0].target)):
                    continue  # a reload has put the module's own there, and applies the patch anew at its end
                bypassed += self._bypassed(state, found)
                if replaced is not None:
                    state.settle("failed", "overwritten", f"{replaced[0].target} was replaced later by {replaced[1]}")
                    lost.append(state)
                elif relied_on is not None:
                    state.settle("failed", RELIED_ON, relied_on)
                    lost.append(state)
                    if state.context is not None:
                        state.context.withdraw_at_next_call()
        with self._patches.lock:
            if all(state.decision is None for state in self._patches.all):
                return None
            content = [state.described() for state in self._patches.all]
        for state in lost:
            self.no_longer_applied(state)
        for line in bypassed:
            to_stderr(line)
        if self._greeting.due_in() <= 0:
            self._greeting.say()
        return content

    @staticmethod
    def _bypassed(state: PatchState, found: list[str]) -> list[str]:
        """The lines on classes that override a target without calling it, but for those of an earlier look."""
        new = [sentence for sentence in found if sentence not in state.bypassed]
        state.bypassed.update(dict.fromkeys(new))
        if found:
            state.settle("applied", "bypassed", "; ".join(found))
        return [f"{state.patch.name} is bypassed: {sentence}" for sentence in new]

    def _write(self, patches: list[dict[str, Any]]) -> None:
        self._report.write(self._patches.packages, patches)

    def _end(self, patches: list[dict[str, Any]] | None) -> None:
        self._greeting.say()
        if not self._patches.environment.keep:
            self._report.remove()
        elif patches is not None:
            self._write(patches)


def _not_applied(state: PatchState) -> str:
    return f"{state.patch.name} is not applied ({state.reason}): {state.detail}"


def _overtaken_by(step: wrapping.Applied) -> str | None:
    try:
        return wrapping.overtaken_by(step)
    except Exception as error:  # somebody's lazy proxy, of what is not bound yet
        return f"an object that raises {type(error).__name__} when its attributes are asked for"


def _is_being_executed(module: str) -> bool:
    """Whether a thread imports or reloads the module right now: its lock is held as long, and nothing else tells of a
    reload.
    """
    lock = getattr(sys.modules["_frozen_importlib"], "_module_locks", {}).get(module)
    return lock is not None and getattr(lock(), "owner", None) is not None


def bundles_beside() -> list[str]:
    """Bundles of other content that PYTHONPATH names, and that serve nothing, since this one does: a sentence each."""
    generation = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    own = {os.path.basename(generation), ""}
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = (place for place in dict.fromkeys(places) if place and not _is_same(place, os.path.dirname(generation)))
    return [
        f"the bundle {place} is on the path, and none of its patches is in use, since another bundle serves: "
        "make one of both (generate --bundle)"
        for place in others
        if vllm_plugin.generation_of(place) not in own
    ]


def _is_same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def end_process(*why: str, because: str = "LIVEPATCH=strict") -> None:
    """End before anything is served. `os._exit`, since an import may run in any thread. `because`: what asks for it."""
    for one in why:
        to_stderr(f"{because}: {one}")
    os._exit(EXIT_STRICT)
