"""The one place that acts: told of a target's import by the hook, it decides, applies, reads back and reports."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from . import application, cache, guard, installed, overrides, patch_code, redaction, settings
from .changed_module import ChangedModule, part_of_import
from .changes import Change, HunkError
from .context import PatchContext, to_stderr
from .decision import Decision, Patch, decide, module_of
from .facts import to_patch
from .greeting import Greeting, Outcome
from .report import ProcessReport
from .reporting import Reporter
from .source_changes import Made, SourceChanges, TooLate, no_place

_Found = TypeVar("_Found")
EXIT_STRICT = 78  # EX_CONFIG
_RECHECK_SECONDS = 15.0
_FLUSH_SECONDS = 1.0
_FIRST_SECONDS = 1.0
"""What the import of the first target waits for the first report, at most: its one line says what is wrong with it."""


class _PatchState:
    """One patch in this process. `state`: armed, applied, skipped or failed."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch
        self.state = "armed"
        self.reason: str | None = None
        self.detail: str | None = None
        self.decision: Decision | None = None
        self.context: PatchContext | None = None
        self.wrappers: dict[str, Callable[..., Any]] = {}  # by target, once the patch's code has made them
        self.applied: list[application.Applied] = []
        self.bypassed: dict[str, None] = {}  # what was said of classes that override its targets

    @property
    def targets(self) -> tuple[str, ...]:
        """Those of the variant that was met; all of them before that."""
        return self.patch.targets_of(None if self.decision is None else self.decision.variant)

    @property
    def missing(self) -> bool:
        """Wanted, and not applied."""
        decision = self.decision
        refused = decision is not None and decision.wanted and not decision.apply
        return self.state == "failed" or (self.state == "skipped" and refused)

    def settle(self, state: str, reason: str | None = None, detail: str | None = None) -> None:
        self.state, self.reason, self.detail = state, reason, detail

    def described(self) -> dict[str, Any]:
        """The object that `status --json` shows for this patch."""
        return {
            "name": self.patch.name,
            "version": self.patch.version,
            "state": self.state,
            "reason": self.reason,
            "detail": None if self.detail is None else redaction.sentence(self.detail),
            "verdict": None if self.decision is None else self.decision.verdict,
            "targets": [*self.targets, *self.patch.added],
            "counters": {} if self.context is None else dict(self.context.counters),
        }


class Runtime:
    """All patches of one bundle in one process."""

    def __init__(self, catalogue: dict[str, Any], root: str, bundle: dict[str, Any]) -> None:
        """`bundle` is what the report says of it besides its version."""
        self.version: str = catalogue["version"]
        self._root = root
        self._digests: dict[str, str] = catalogue["digests"]
        self._changes: dict[str, list[Any]] = catalogue["changes"]
        patches = [to_patch(name, facts) for name, facts in sorted(catalogue["patches"].items())]
        self.environment = settings.read(patches, os.environ)
        self.states = [_PatchState(patch) for patch in patches]
        self.packages: dict[str, str | None] = {}
        about = {
            **bundle,
            "version": self.version,
            "settings": settings.asked(patches, self.environment),
        }
        self.report = ProcessReport(os.environ, about)
        self._trees: dict[tuple[str, ...], installed.Tree] = {}
        place = cache.in_time(cache.directory, os.environ)
        self._fingerprints = cache.Fingerprints(place)
        self._sources = SourceChanges(place)
        # Over our records. Never held while anything is imported or read, or while a target's or a patch's code runs:
        # a thread that imports may want it, and would be waited for.
        self._lock = threading.RLock()
        self._decided: set[str] = set()  # patches
        self._too_late: frozenset[str] = frozenset()  # modules that are not patched any more
        self._unsaid: list[_PatchState] = []  # decided on
        self._greeted = False
        name = f"{self.version}+{about['digest'][: len('sha256:') + 12]}" if about["digest"] else self.version
        self._greeting = Greeting(self.version, name, self._outcomes, self._trouble)
        self._reporter = Reporter(self._look_over, self._write, self._end, self._greeting.due_in)

    def begin(self) -> None:
        """Serve: this is the process's one runtime."""
        os.register_at_fork(before=self._about_to_fork, after_in_child=self._forked)
        atexit.register(self._close)

    # The course of one target's import

    def will_execute(self, module: str) -> None:
        """A target module will be executed by way of us, and not before `before_execution` has come back."""
        self._sources.arriving.add(module)

    def armed_late(self, modules: list[str]) -> None:
        """These were imported before us, and others may hold what they took from them: their patches do not apply."""
        self._too_late = frozenset(modules)
        for module in modules:
            self.before_execution(module)

    def before_execution(self, module: str) -> None:
        """A target module is about to be executed, or was before us: decide about every patch that names it."""
        self._decide_about(self._of(module))
        self._checked_and_written()

    def _decide_about(self, states: list[_PatchState]) -> None:
        """Source changes first, all of the package's: wrappers are decided on, and wrap, what those make of it."""
        packages = {state.patch.package for state in states}
        changes = [state for state in self.states if state.patch.diff and state.patch.package in packages]
        for state in [*changes, *(state for state in states if not state.patch.diff)]:
            if state.decision is None:
                self._decide(state)
            self._say_decisions()

    def after_execution(self, module: ModuleType) -> None:
        """A target module has been executed: apply every patch whose target modules are now all there."""
        if sys.modules.get(module.__name__) is not module:
            return  # somebody's private copy: no caller reaches it by its name
        application.executed(module)
        for state in sorted(self._of(module.__name__), key=lambda state: not state.patch.diff):
            decision = state.decision
            if decision is None or not decision.apply or state.state == "failed":
                continue
            if state.patch.diff:
                self._read_back(state)
                if state.state == "failed":
                    self._not_applied(state)
            elif state.patch.apart or all(application.is_loaded(module_of(name)) for name in state.targets):
                self._apply(state, [name for name in state.targets if application.is_loaded(module_of(name))])
                if state.state == "failed":
                    self._not_applied(state)
        self._checked_and_written()
        self._later(_RECHECK_SECONDS)

    def out_of_reach(self, module: str, why: str) -> None:
        """A target module is being loaded without our being told when it has run."""
        for state in self._of(module):
            if state.decision is not None and state.decision.apply and state.state != "failed":
                self._unapply(state, "loader", f"{module} cannot be patched, {why}")
                self._not_applied(state)
        self._checked_and_written()

    def _of(self, module: str) -> list[_PatchState]:
        return [state for state in self.states if module in (*state.patch.modules, *state.patch.added)]

    def _decide(self, state: _PatchState) -> None:
        """Two threads may both work it out, so that neither waits for the other; what the first one found counts."""
        patch, before = state.patch, state.decision
        while True:
            texts = self._sources.texts
            decision, releases, made = self._worked_out(patch)
            with self._lock:
                if state.decision is not before:
                    return
                if self._sources.texts is not texts:  # it was worked out on what is no longer so
                    continue
                if made is not None:
                    self._sources.put(patch.name, made)
                self.packages.update(releases)
                state.decision = decision
                if not decision.apply:
                    state.settle("skipped", decision.reason, decision.detail)
                elif decision.reason != "needed":
                    state.settle("armed", decision.reason, decision.detail)
                if before is None:
                    self._decided.add(patch.name)
                    self._unsaid.append(state)
                return

    def _worked_out(self, patch: Patch) -> tuple[Decision, dict[str, str | None], Made | None]:
        """The decision, the releases that were met, and what a diff that applies makes. Reads files, may import."""
        releases: dict[str, str | None] = {}
        made = None
        try:
            tree = self._trees.setdefault(patch.packages, installed.of_process(*patch.packages))
            changed = tree if patch.diff else installed.Overlay(tree, self._sources.texts)
            found = installed.look(patch, changed, self._fingerprints.of_names)
            releases = {patch.package: found.release, **found.companions}
            traced = patch.auto == "traced" and bool(self.patch_set())
            decision = decide(patch, found, dataclasses.replace(self.environment, traced=traced))
            early = sorted(self._too_late.intersection(map(module_of, patch.targets_of(decision.variant))))
            if decision.apply and early:
                detail = f"imported before the guard armed the bundle: {', '.join(early)}"
                decision = dataclasses.replace(decision, apply=False, reason="late", detail=detail)
            if patch.diff and decision.apply:
                changes = [Change.from_json(change) for change in self._changes[patch.name]]
                made = self._sources.made(changes, tree)
        except TooLate as error:
            decision = Decision("needed", False, True, "imported", str(error))
        except HunkError as error:
            decision = no_place(error)
        except Exception as error:
            decision = Decision("drifted", False, True, "raised", f"{type(error).__name__}: {error}")
        return decision, releases, made

    def _say_decisions(self) -> None:
        while self._unsaid:
            with self._lock:
                state = self._unsaid.pop(0) if self._unsaid else None
            if state is not None:
                self._said_of(state)

    def _said_of(self, state: _PatchState) -> None:
        decision = state.decision
        assert decision is not None
        with self._lock:  # two threads may meet two targets at once
            greets, self._greeted = not self._greeted, True
        if greets:
            self._begin_summary()
        if decision.reason in ("unverified", "forced"):
            self._greeting.behind(f"{state.patch.name}: {decision.detail}")
        if decision.wanted and not decision.apply:
            self._not_applied(state)

    def _begin_summary(self) -> None:
        self._greeting.begin(self.packages)
        if not self._reporter.flush(_FIRST_SECONDS):
            self.report.late()
            self._greeting.say()  # nobody would come to it later
        troubles = (*self.environment.errors, *self.environment.notes)
        if troubles and self.environment.mode == "strict":
            self._end_process("; ".join(troubles))
        for said in troubles:
            self._greeting.behind(said)

    def _outcomes(self) -> list[Outcome]:
        """What came of each patch so far."""
        with self._lock:
            return [Outcome(state.patch.versioned, state.state, state.missing) for state in self.states]

    def _trouble(self) -> str:
        return f"; {self.report.error}" if self.report.error else ""

    def _end_process(self, why: str) -> None:
        self._greeting.say()
        end_process(why)

    def _apply(self, state: _PatchState, targets: list[str]) -> None:
        patch, decision = state.patch, state.decision
        assert decision is not None
        try:
            with self._lock:
                if state.context is None:
                    variant = decision.variant
                    options = self.environment.options[patch.name]
                    facts = {} if variant is None else variant.facts
                    later = functools.partial(self._later, _FLUSH_SECONDS)
                    asked = self.environment.toggles.get(patch.name) in ("on", "force")
                    failed = functools.partial(self._raised, state)
                    state.context = PatchContext(patch.name, options, facts, later, self.patch_set, asked, failed)
                context = state.context
            made = state.wrappers = state.wrappers or self._made(patch, context)
            if set(made) != set(patch.targets):
                raise application.ApplyError("mismatch", "its code wraps other targets than its patch.toml names")
            wanted = {target: made[target] for target in targets}
            while not _patiently(lambda: self._put_around(state, context, wanted)):
                pass  # another thread was faster: on what it left
        except application.ApplyError as error:
            self._unapply(state, error.reason, error.detail)
        except (Exception, SystemExit) as error:  # a patch may end itself, not the process
            self._unapply(state, "raised", f"{type(error).__name__} while applying: {error}")

    def _made(self, patch: Patch, context: PatchContext) -> dict[str, Callable[..., Any]]:
        wrappers = _patiently(lambda: patch_code.load(self._root, patch.name).wrappers)
        return dict(wrappers(context))

    def _put_around(self, state: _PatchState, context: PatchContext, made: dict[str, Callable[..., Any]]) -> bool:
        """Whether the wrappers are in place, or have no place any more; False where another thread came in between.

        Raises ApplyError.
        """
        applied = state.applied
        before = [other.applied for other in self.states]
        known = [step.wrapper for steps in before for step in steps]
        # All but a reloaded module's; another patch, or somebody else, may have wrapped them since.
        own = [step for step in applied if application.overtaken_by(step) is None]
        there = {step.target for step in own}
        wrappers = {target: wrapper for target, wrapper in made.items() if target not in there}
        forced = state.decision is not None and state.decision.reason == "forced"

        def stand_in(original: Any, wrapper: Callable[..., Any], target: str) -> Any:
            return guard.in_place_of(original, wrapper, context, target)

        try:
            planned = application.planned(wrappers, stand_in, known, self._sources.files(), forced)
        except application.ApplyError:
            with self._lock:  # somebody else's may be what another thread of ours has put there
                if any(other.applied is not steps for other, steps in zip(self.states, before, strict=True)):
                    return False
            raise
        with self._lock:
            if context.aside:  # a target that was there before has raised meanwhile
                return True
            if state.applied is not applied or not all(map(application.is_as_planned, planned)):
                return False
            application.put_in_place(planned)
            state.applied = own + planned
            rest = f"{len(state.applied)} of {len(state.targets)} targets imported so far"
            whole = len(state.applied) == len(state.targets)
            state.settle("applied", *(self._asked(state) if whole else ("partly", rest)))
        return True

    def _raised(self, state: _PatchState, detail: str) -> None:
        """A wrapper's own error: the patch stands aside. Said, and no more: what serves already is not ended."""
        with self._lock:
            state.settle("failed", "raised", detail)
        to_stderr(f"{state.patch.name} is no longer applied (raised): {detail}")
        self._later(_FLUSH_SECONDS)  # by another thread: the engine waits for no disk

    @staticmethod
    def _asked(state: _PatchState) -> tuple[str | None, str | None]:
        """Why a patch is applied where it is not needed as a matter of course."""
        decision = state.decision
        return (None, None) if decision is None or decision.reason == "needed" else (decision.reason, decision.detail)

    def _unapply(self, state: _PatchState, reason: str, detail: str) -> None:
        """All or nothing, also where the targets came one by one, or one of them once more."""
        with self._lock:
            steps, state.applied = state.applied, []
            application.undo(step for step in steps if application.in_place(step))
            state.settle("failed", reason, detail)
        if steps and state.context is not None:  # who took our wrapper by name still calls it
            state.context.withdraw()

    # Source changes

    def changed(self, module: str) -> ChangedModule | None:
        """What the module is to be made of, None where its own source stands."""
        return self._sources.module(module)

    def added(self, module: str) -> ModuleSpec | None:
        """The spec of a module that only a diff has."""
        if any(module in state.patch.added for state in self.states):
            guarded(self.before_execution, module)
        return self._sources.added(module)

    def is_gone(self, module: str) -> bool:
        """Whether it was decided that this module, which diffs would add, is not there. Waits for nothing."""
        of = [state.patch.name for state in self.states if module in state.patch.added]
        return self._decided.issuperset(of) and self._sources.module(module) is None

    @part_of_import
    def execute(self, module: ModuleType, loader: Any, changed: ChangedModule) -> None:
        """Execute the changed source as the module. Where it raises, the module works as it came, and it is said."""
        self._sources.execute(module, loader, changed, self._give_up)

    def _give_up(self, patches: list[str], why: str, stay: set[str]) -> None:
        said = f"{why}; loaded earlier, and so still as changed: {', '.join(sorted(stay))}" if stay else why
        dropped: set[str] = set()
        for state in [state for state in self.states if state.patch.name in patches]:
            state.settle("failed", "raised", said)
            self._not_applied(state)
            dropped.update(state.patch.modules)
        for state in self.states:  # wrappers are decided on anew, on the modules' own source
            if not state.patch.diff and state.decision is not None and dropped.intersection(state.patch.modules):
                self._decide(state)

    def _read_back(self, state: _PatchState) -> None:
        """A source change is applied when what callers import was made of it; modules not imported yet will be."""
        loaded, of, wrong = self._sources.loaded(state.patch.name)
        if wrong is not None:
            state.settle("failed", "readback", f"{wrong}, looked up again, was not made of the changed source")
        elif loaded < of:
            state.settle("applied", "partly", f"{loaded} of {of} modules imported so far")
        else:
            state.settle("applied", *self._asked(state))

    def patch_set(self) -> str:
        """What the patches make of the code that torch.compile traces, as a digest; empty where they leave it alone.

        Decided on now, also for modules that are imported later or elsewhere: it must be the same in all processes.
        """
        traced = [state for state in self.states if state.patch.traced]
        self._decide_about(traced)
        parts = [
            f"{state.patch.name} {self._digests[state.patch.name]} {self.environment.options[state.patch.name]}"
            for state in traced
            if state.decision is not None and state.decision.apply and state.state != "failed"
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""

    def _not_applied(self, state: _PatchState) -> None:
        said = f"{state.patch.name} is not applied ({state.reason}): {state.detail}"
        if self.environment.mode == "strict":
            self._end_process(said)
        self._greeting.behind(said)

    # The report

    def _look_over(self) -> list[dict[str, Any]] | None:
        """Look every applied target up again: what the report says of the patches, None where there is none yet."""
        lost: list[_PatchState] = []
        bypassed: list[str] = []
        for state in self.states:
            steps = state.applied
            if state.state != "applied":
                continue
            found = overrides.bypassing(steps)
            overtaken = ((step, application.overtaken_by(step)) for step in steps)
            replaced = next(((step, by) for step, by in overtaken if by is not None), None)
            with self._lock:
                if state.applied is not steps or state.state != "applied":
                    continue  # what was looked up is no longer so
                bypassed += self._bypassed(state, found)
                if replaced is not None:
                    state.settle("failed", "overwritten", f"{replaced[0].target} was replaced later by {replaced[1]}")
                    lost.append(state)
        with self._lock:
            if all(state.decision is None for state in self.states):
                return None
            content = [state.described() for state in self.states]
        for state in lost:  # said, and no more: what serves already is not ended, not even under strict
            to_stderr(f"{state.patch.name} is no longer applied ({state.reason}): {state.detail}")
        for said in bypassed:
            to_stderr(said)
        if self._greeting.due_in() <= 0:
            self._greeting.say()
        return content

    @staticmethod
    def _bypassed(state: _PatchState, found: list[str]) -> list[str]:
        """What is to be said of classes that override a target without calling it, and was not said before."""
        new = [said for said in found if said not in state.bypassed]
        state.bypassed.update(dict.fromkeys(new))
        if found:
            state.settle("applied", "bypassed", "; ".join(found))
        return [f"{state.patch.name} is bypassed: {said}" for said in new]

    def _write(self, patches: list[dict[str, Any]]) -> None:
        self.report.write(self.packages, patches)

    def _end(self, patches: list[dict[str, Any]] | None) -> None:
        self._greeting.say()
        if not self.environment.keep:
            self.report.remove()
        elif patches is not None:
            self._write(patches)

    def _checked_and_written(self) -> None:
        self._greeting.wait()
        self._later(0.0)

    def _later(self, seconds: float) -> None:
        """Have the report written in so many seconds at the latest, and wait for nothing."""
        self._reporter.soon(seconds)

    def _close(self) -> None:
        self._reporter.close()
        self._greeting.say()  # where a file system that hangs keeps the thread that would

    def _about_to_fork(self) -> None:
        self._greeting.say()  # the thread that would say it ends here
        self._reporter.about_to_fork()

    def _forked(self) -> None:
        self._lock = threading.RLock()
        for state in self.states:
            if state.context is not None:
                state.context.forget()
        self.report.begin()
        self._reporter.forked_child()


def _patiently(step: Callable[[], _Found]) -> _Found:
    """What a step gives that imports.

    Where several threads import at once, Python may take their waiting for a deadlock and give out a module of the
    standard library of which half is there, importlib itself among them. A moment later all of it is.
    """
    for _ in range(3):
        try:
            return step()
        except (AttributeError, ImportError, NameError):
            time.sleep(0.1)
    return step()


def end_process(why: str) -> None:
    """LIVEPATCH=strict: end before anything is served. `os._exit`, since an import may run in any thread."""
    to_stderr(f"LIVEPATCH=strict: {why}")
    os._exit(EXIT_STRICT)


def guarded(step: Callable[..., None], *args: Any) -> None:
    """Whatever goes wrong in here, the target is imported."""
    try:
        step(*args)
    except Exception as error:
        to_stderr(f"an error of its own, please report it: {type(error).__name__}: {error}")
