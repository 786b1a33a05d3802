"""The one place that acts: told of a target's import by the hook, it decides, applies, reads back and reports."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import application, installed, settings
from .changed_module import ChangedModule, cache_directory, part_of_import
from .changes import Change, HunkError, changed
from .context import PatchContext, to_stderr
from .decision import Decision, Patch, decide, module_of
from .facts import to_patch
from .report import ProcessReport

EXIT_STRICT = 78  # EX_CONFIG
_RECHECK_SECONDS = 15.0
_FLUSH_SECONDS = 1.0


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
        self.changes: list[Change] = []  # of a source change, once its place was found in every module

    @property
    def targets(self) -> tuple[str, ...]:
        """Those of the variant that was met; all of them before that."""
        return self.patch.targets_of(None if self.decision is None else self.decision.variant)

    def settle(self, state: str, reason: str | None = None, detail: str | None = None) -> None:
        self.state, self.reason, self.detail = state, reason, detail

    def described(self) -> dict[str, Any]:
        """The object that `status --json` shows for this patch."""
        return {
            "name": self.patch.name,
            "state": self.state,
            "reason": self.reason,
            "detail": self.detail,
            "verdict": None if self.decision is None else self.decision.verdict,
            "targets": [*self.targets, *self.patch.added],
            "counters": {} if self.context is None else dict(self.context.counters),
        }


class Runtime:
    """All patches of one bundle in one process."""

    def __init__(self, catalogue: dict[str, Any], root: str, bundle: str) -> None:
        self.version: str = catalogue["version"]
        self._root = root
        self._digests: dict[str, str] = catalogue["digests"]
        self._changes: dict[str, list[Any]] = catalogue["changes"]
        patches = [to_patch(name, facts) for name, facts in sorted(catalogue["patches"].items())]
        self.environment = settings.read(patches, os.environ)
        self.states = [_PatchState(patch) for patch in patches]
        self.packages: dict[str, str | None] = {}
        self.report = ProcessReport(os.environ, bundle)
        self._trees: dict[str, installed.Tree] = {}
        self._changed: dict[str, ChangedModule] = {}
        self._texts: dict[str, str] = {}  # of the changed modules
        self._added: dict[str, bool] = {}  # modules that diffs add: whether they are packages
        self._executing = _Executing()
        self._lock = threading.RLock()  # over our records: never held while a target's or a patch's code runs
        self._writing = threading.Lock()
        self._greeted = False
        self._flush: threading.Timer | None = None
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._checked_and_written)

    # The course of one target's import

    def meet(self, module: str) -> None:
        """A target module is about to be loaded: decide about every patch that names it.

        Source changes first, all of the package's: wrappers are decided on, and wrap, what those make of the code.
        """
        named = self._of(module)
        packages = {state.patch.package for state in named}
        changes = [state for state in self.states if state.patch.diff and state.patch.package in packages]
        for state in [*changes, *(state for state in named if not state.patch.diff)]:
            with self._lock:
                first = state.decision is None
                if first:
                    self._decide(state)
            if first:
                self._said_of(state)
        self._checked_and_written()

    def loaded(self, module: ModuleType) -> None:
        """A target module has been executed: apply every patch whose target modules are now all there."""
        if sys.modules.get(module.__name__) is not module:
            return  # somebody's private copy: no caller reaches it by its name
        for state in sorted(self._of(module.__name__), key=lambda state: not state.patch.diff):
            decision = state.decision
            if decision is None or not decision.apply or state.state == "failed":
                continue
            if state.patch.diff:
                self._read_back(state)
                if state.state == "failed":
                    self._not_applied(state)
            elif state.patch.apart or all(_is_loaded(module_of(name), module) for name in state.targets):
                self._apply(state, [name for name in state.targets if _is_loaded(module_of(name), module)])
                if state.state == "failed":
                    self._not_applied(state)
        self._checked_and_written()
        self._later(_RECHECK_SECONDS)

    def _of(self, module: str) -> list[_PatchState]:
        return [state for state in self.states if module in (*state.patch.modules, *state.patch.added)]

    def _decide(self, state: _PatchState) -> None:
        patch = state.patch
        try:
            tree = self._trees.setdefault(patch.package, installed.of_process(patch.package))
            found = installed.look(patch, tree if patch.diff else installed.Overlay(tree, self._texts))
            self.packages[patch.package] = found.release
            state.decision = decide(patch, found, self.environment)
            if patch.diff and state.decision.apply:
                self._place(state, tree)
        except HunkError as error:
            state.decision = Decision("drifted", False, True, "drifted", f"the diff has no place here: {error}")
        except Exception as error:
            state.decision = Decision("drifted", False, True, "raised", f"{type(error).__name__}: {error}")
        decision = state.decision
        if not decision.apply:
            state.settle("skipped", decision.reason, decision.detail)
        elif decision.reason != "needed":
            state.settle("armed", decision.reason, decision.detail)

    def _place(self, state: _PatchState, tree: installed.Tree) -> None:
        """Find the place of every hunk in every module, and compile: only then is any module changed."""
        changes = [Change.from_json(change) for change in self._changes[state.patch.name]]
        cache = cache_directory(os.environ)
        made: dict[str, ChangedModule] = {}
        for change in changes:
            text = self._texts.get(change.module) or tree.source(change.module)
            if change.added == (text is not None):
                raise HunkError(f"{change.module} {'exists already' if change.added else 'is not there'}")
            new = change.text if text is None else changed(text, change.hunks)
            made[change.module] = ChangedModule(change.module, new, tree.origin(change.module), cache)
            made[change.module].code()
        self._changed.update(made)
        self._texts.update({name: module.text for name, module in made.items()})
        self._added.update({change.module: change.package for change in changes if change.added})
        state.changes = changes

    def _said_of(self, state: _PatchState) -> None:
        decision = state.decision
        assert decision is not None
        if not self._greeted:
            self._greeted = True
            self._greet(state.patch)
        if decision.reason in ("unverified", "forced"):
            to_stderr(f"{state.patch.name}: {decision.detail}")
        if decision.wanted and not decision.apply:
            self._not_applied(state)

    def _greet(self, patch: Patch) -> None:
        self._checked_and_written()
        release = self.packages.get(patch.package) or "of unknown release"
        trouble = f"; {self.report.error}" if self.report.error else ""
        to_stderr(f"{self.version}, pid {os.getpid()}, {patch.package} {release}; LIVEPATCH=off turns it off{trouble}")
        for error in (*self.environment.errors, *self.environment.notes):
            to_stderr(error)
        if self.environment.errors and self.environment.mode == "strict":
            end_process(self.environment.errors[0])

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
                    state.context = PatchContext(patch.name, options, facts, later, self.patch_set)
            code = importlib.import_module(f"{self._root}.patches.{patch.name.replace('-', '_')}.wrappers")
            wrapt = importlib.import_module(f"{self._root}.vendor.wrapt")
            made = state.wrappers = state.wrappers or dict(code.wrappers(state.context))
            if set(made) != set(patch.targets):
                raise application.ApplyError("mismatch", "its code wraps other targets than its patch.toml names")
            with self._lock:
                known = [step.wrapper for other in self.states for step in other.applied]
                own = [step for step in state.applied if application.in_place(step)]  # all but a reloaded module's
                there = {step.target for step in own}
                wrappers = {target: made[target] for target in targets if target not in there}
                files = {name: module.filename for name, module in self._changed.items()}
                forced = decision.reason == "forced"
                state.applied = own + application.apply(wrappers, wrapt.FunctionWrapper, known, files, forced)
                rest = f"{len(state.applied)} of {len(state.targets)} targets imported so far"
                whole = len(state.applied) == len(state.targets)
                asked = (decision.reason, decision.detail) if decision.reason != "needed" else (None, None)
                state.settle("applied", *(asked if whole else ("partly", rest)))
        except application.ApplyError as error:
            self._unapply(state, error.reason, error.detail)
        except Exception as error:
            self._unapply(state, "raised", f"{type(error).__name__} while applying: {error}")

    def _unapply(self, state: _PatchState, reason: str, detail: str) -> None:
        """All or nothing, also where the targets came one by one."""
        with self._lock:
            if state.patch.apart:
                application.undo(step for step in state.applied if application.in_place(step))
                state.applied = []
            state.settle("failed", reason, detail)

    # Source changes

    def changed(self, module: str) -> ChangedModule | None:
        """What the module is to be made of, None where its own source stands."""
        return self._changed.get(module)

    def adds(self, module: str) -> bool | None:
        """Whether a module that a diff adds is a package; None where none adds it."""
        if any(module in state.patch.added for state in self.states):
            guarded(self.meet, module)
        return self._added.get(module)

    @part_of_import
    def execute(self, module: ModuleType, loader: Any, changed: ChangedModule) -> None:
        """Execute the changed source as the module. Where it raises, the module works as it came, and it is said."""
        before, loaded_before = dict(vars(module)), set(sys.modules)
        outermost = not self._executing.modules
        self._executing.modules.append(module.__name__)
        try:
            changed.execute(module)
        except Exception as error:
            if not outermost or changed.origin is None:
                raise  # the outermost one undoes it for all, so that no half of a change stays; or it is the diff's own
            vars(module).clear()
            vars(module).update(before)
            changed.undress(loader)
            self._give_up(module.__name__, error, loaded_before)
            loader.exec_module(module)
        finally:
            self._executing.modules.pop()

    def _give_up(self, module: str, error: Exception, loaded_before: set[str]) -> None:
        """Drop every source change that has a part in this module, and what was made of it since its import began.

        Wrappers are decided on anew, on the modules' own source.
        """
        dropped: set[str] = set()
        for state in [state for state in self._of(module) if state.changes]:
            names = {change.module for change in state.changes} - {module}
            stay = sorted(names & loaded_before)
            said = f"; changed already, and so they stay: {', '.join(stay)}" if stay else ""
            state.settle("failed", "raised", f"{module} as changed: {type(error).__name__}: {error}{said}")
            dropped |= {module} | names - loaded_before
            self._not_applied(state)
        for name in dropped:
            self._changed.pop(name, None)
            self._texts.pop(name, None)
            self._added.pop(name, None)
            if name != module and sys.modules.pop(name, None) is not None:
                parent, _, attribute = name.rpartition(".")
                vars(sys.modules[parent]).pop(attribute, None)
        for state in self.states:
            if not state.patch.diff and state.decision is not None and dropped.intersection(state.patch.modules):
                self._decide(state)

    def _read_back(self, state: _PatchState) -> None:
        """A source change is applied when what callers import was made of it; modules not imported yet will be."""
        names = [change.module for change in state.changes]
        loaded = [name for name in names if name in sys.modules]
        made = {name: self._changed.get(name) for name in loaded}
        wrong = [name for name, changed in made.items() if not (changed and changed.in_place(sys.modules[name]))]
        if wrong:
            state.settle("failed", "readback", f"{wrong[0]}, looked up again, was not made of the changed source")
        else:
            rest = f"{len(loaded)} of {len(names)} modules imported so far"
            state.settle("applied", *(("partly", rest) if len(loaded) < len(names) else (state.reason, None)))

    def patch_set(self) -> str:
        """What the patches make of the code that torch.compile traces, as a digest; empty where they leave it alone."""
        traced = [state for state in self.states if state.patch.traced and state.decision and state.decision.apply]
        parts = [
            f"{state.patch.name} {self._digests[state.patch.name]} {self.environment.options[state.patch.name]}"
            for state in traced
            if state.state != "failed"
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""

    def _not_applied(self, state: _PatchState) -> None:
        said = f"{state.patch.name} is not applied ({state.reason}): {state.detail}"
        if self.environment.mode == "strict":
            end_process(said)
        to_stderr(said)

    # The report

    def _checked_and_written(self) -> None:
        """Look every applied target up again, and leave the report."""
        lost: list[_PatchState] = []
        with self._lock:
            for state in self.states:
                for step in state.applied if state.state == "applied" else ():
                    stranger = application.overtaken_by(step)
                    if stranger is not None:
                        state.settle("failed", "overwritten", f"{step.target} was replaced later by {stranger}")
                        lost.append(state)
                        break
            content = [state.described() for state in self.states]
        with self._writing:  # a lock of its own: who counts must not wait for a disk
            self.report.write(self.packages, content)
        for state in lost:  # said, and no more: what serves already is not ended, not even under strict
            to_stderr(f"{state.patch.name} is applied no more ({state.reason}): {state.detail}")

    def _later(self, seconds: float) -> None:
        """Write the report soon, by a thread that lives no longer than that: once however often it is asked for."""
        with self._lock:
            if self._flush is not None and (self._flush.interval <= seconds):
                return
            if self._flush is not None:
                self._flush.cancel()
            self._flush = threading.Timer(seconds, self._flushed)
            self._flush.daemon = True
            try:
                self._flush.start()
            except RuntimeError:  # the interpreter is ending, or has no thread left: atexit writes
                self._flush = None

    def _flushed(self) -> None:
        with self._lock:
            self._flush = None
        self._checked_and_written()

    def _forked(self) -> None:
        self._lock, self._writing = threading.RLock(), threading.Lock()
        self._flush = None
        for state in self.states:
            if state.context is not None:
                state.context.forget()
        self.report.begin()
        self._checked_and_written()


class _Executing(threading.local):
    """The changed modules whose execution this thread is in, outermost first."""

    def __init__(self) -> None:
        self.modules: list[str] = []


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


def _is_loaded(name: str, just_now: ModuleType) -> bool:
    module = sys.modules.get(name)
    if module is just_now:
        return True
    # A module that is being imported is in sys.modules already; its spec says so.
    return module is not None and not getattr(module.__spec__, "_initializing", False)
