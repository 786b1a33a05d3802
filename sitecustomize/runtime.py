"""The one place that acts: it meets the import of a target, decides, applies, reads back and reports.

Imported by the bundle's entry when the first target module is looked for, and not before.
"""

from __future__ import annotations

import atexit
import copy
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import application, installed, settings
from .context import PatchContext, to_stderr
from .decision import Decision, Patch, decide
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
        self.applied: list[application.Applied] = []

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
            "targets": list(self.patch.targets),
            "counters": {} if self.context is None else dict(self.context.counters),
        }


class Runtime:
    """All patches of one bundle in one process."""

    def __init__(self, catalogue: dict[str, Any], root: str, bundle: str) -> None:
        self.version: str = catalogue["version"]
        self._root = root
        patches = [to_patch(name, facts) for name, facts in sorted(catalogue["patches"].items())]
        self.environment = settings.read(patches, os.environ)
        self.states = [_PatchState(patch) for patch in patches]
        self.packages: dict[str, str | None] = {}
        self.report = ProcessReport(os.environ, bundle)
        self._trees: dict[str, installed.Tree] = {}
        self._lock = threading.RLock()  # over our records: never held while a target's or a patch's code runs
        self._writing = threading.Lock()
        self._greeted = False
        self._flush: threading.Timer | None = None
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._checked_and_written)

    # The course of one target's import

    def meet(self, module: str) -> None:
        """A target module is about to be loaded: decide about every patch that names it."""
        for state in self._of(module):
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
        for state in self._of(module.__name__):
            decision = state.decision
            if decision is None or not decision.apply or state.state == "failed":
                continue
            if all(_is_loaded(name, module) for name in state.patch.modules):
                self._apply(state)
                if state.state == "failed":
                    self._not_applied(state)
        self._checked_and_written()
        self._later(_RECHECK_SECONDS)

    def _of(self, module: str) -> list[_PatchState]:
        return [state for state in self.states if module in state.patch.modules]

    def _decide(self, state: _PatchState) -> None:
        patch = state.patch
        try:
            tree = self._trees.setdefault(patch.package, installed.of_process(patch.package))
            found = installed.look(patch, tree)
            self.packages[patch.package] = found.release
            state.decision = decide(patch, found, self.environment)
        except Exception as error:
            state.decision = Decision("drifted", False, True, "raised", f"{type(error).__name__}: {error}")
        decision = state.decision
        if not decision.apply:
            state.settle("skipped", decision.reason, decision.detail)
        elif decision.reason != "needed":
            state.settle("armed", decision.reason, decision.detail)

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

    def _apply(self, state: _PatchState) -> None:
        patch, decision = state.patch, state.decision
        assert decision is not None
        try:
            with self._lock:
                if state.context is None:
                    variant = decision.variant
                    options = self.environment.options[patch.name]
                    facts = {} if variant is None else variant.facts
                    state.context = PatchContext(patch.name, options, facts, lambda: self._later(_FLUSH_SECONDS))
            code = importlib.import_module(f"{self._root}.patches.{patch.name.replace('-', '_')}.wrappers")
            wrapt = importlib.import_module(f"{self._root}.vendor.wrapt")
            wrappers = dict(code.wrappers(state.context))
            if set(wrappers) != set(patch.targets):
                raise application.ApplyError("mismatch", "its code wraps other targets than its patch.toml names")
            with self._lock:
                known = [step.wrapper for other in self.states for step in other.applied]
                own = [step for step in state.applied if application.in_place(step)]  # all but a reloaded module's
                for step in own:
                    wrappers.pop(step.target)
                forced = decision.reason == "forced"
                state.applied = own + application.apply(wrappers, wrapt.FunctionWrapper, known, forced)
                state.settle("applied", state.reason, state.detail)
        except application.ApplyError as error:
            state.settle("failed", error.reason, error.detail)
        except Exception as error:
            state.settle("failed", "raised", f"{type(error).__name__} while applying: {error}")

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


def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """The module's spec as the finders behind ours give it, its loader made to tell us when the module has executed.

    The loader keeps its type and is a copy of its own, since a zip file's loader serves many modules; the only thing
    changed on it is undone before the module's code runs.
    """
    if name in _finding.names:
        return None  # a finder behind us asks all finders again
    _finding.names.add(name)
    try:
        spec = _next_spec(name, path, target)
    finally:
        _finding.names.discard(name)
    runtime = _the_runtime()
    if runtime is None or spec is None or not hasattr(spec.loader, "exec_module"):
        return spec
    _guarded(runtime.meet, name)
    loader: Any = copy.copy(spec.loader)

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        loader.exec_module(module)
        _guarded(runtime.loaded, module)

    # The interpreter cuts its import machinery out of tracebacks by these two names: ours is part of it.
    exec_module.__code__ = exec_module.__code__.replace(
        co_filename="<frozen importlib._bootstrap>", co_name="_call_with_frames_removed"
    )
    loader.exec_module = exec_module
    spec.loader = loader
    return spec


def imported_before(name: str) -> None:
    """A target module that was imported before the entry ran."""
    runtime = _the_runtime()
    if runtime is not None:
        _guarded(runtime.meet, name)
        _guarded(runtime.loaded, sys.modules[name])


def end_process(why: str) -> None:
    """LIVEPATCH=strict: end before anything is served. `os._exit`, since an import may run in any thread."""
    to_stderr(f"LIVEPATCH=strict: {why}")
    os._exit(EXIT_STRICT)


def _guarded(step: Callable[..., None], *args: Any) -> None:
    """Whatever goes wrong in here, the target is imported."""
    try:
        step(*args)
    except Exception as error:
        to_stderr(f"an error of its own, please report it: {type(error).__name__}: {error}")


class _Finding(threading.local):
    def __init__(self) -> None:
        self.names: set[str] = set()


_finding = _Finding()
_made_lock = threading.Lock()
_made: list[Runtime | None] = []


def _the_runtime() -> Runtime | None:
    """This process's runtime; None where the bundle itself is broken, which is said once."""
    with _made_lock:
        if not _made:
            try:
                _made.append(_from_bundle())
            except Exception as error:
                why = f"the bundle cannot be used, nothing is patched: {type(error).__name__}: {error}"
                if os.environ.get("LIVEPATCH") == "strict":
                    end_process(why)
                to_stderr(why)
                _made.append(None)
        return _made[0]


def _from_bundle() -> Runtime:
    root = __name__.partition(".")[0]
    package = sys.modules[root]
    where = os.path.dirname(str(package.__file__))
    data = package.__spec__.loader.get_data(os.path.join(where, "catalogue.json"))  # type: ignore[union-attr]
    return Runtime(json.loads(data.decode("utf-8")), root, os.path.dirname(where))


def _next_spec(name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    finders = list(sys.meta_path)
    own = [getattr(finder, "__name__", "") for finder in finders].index("LivepatchFinder")
    for finder in finders[own + 1 :]:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path, target)
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None


def _is_loaded(name: str, just_now: ModuleType) -> bool:
    module = sys.modules.get(name)
    if module is just_now:
        return True
    # A module that is being imported is in sys.modules already; its spec says so.
    return module is not None and not getattr(module.__spec__, "_initializing", False)
