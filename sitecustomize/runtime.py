"""The course of each target's import in this process: decide, apply, look again, report.

Each of these is another module's; the hook calls this one at each import, and this one calls them in order.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import cache, wrapping
from .applying import Applier
from .changed_module import ChangedModule, part_of_import
from .context import to_stderr
from .decision import Decision, module_of
from .outcomes import Reporter
from .patch_state import PatchState, PatchStates
from .process_decisions import Decider
from .source_changes import End, SourceChanges

_RECHECK_SECONDS = 15.0
_AS_PROGRAM = "runs as the program (python -m)"


class Runtime:
    """All patches of one bundle in one process."""

    def __init__(self, catalogue: dict[str, Any], root: str, bundle: dict[str, Any]) -> None:
        """`bundle` is what the report says of it besides its version."""
        self.patches = PatchStates(catalogue["patches"], os.environ)
        self.reporter = Reporter(self.patches, catalogue["version"], bundle)
        place = cache.in_time(cache.directory, os.environ)
        self._sources = SourceChanges(place)
        self._decider = Decider(self.patches, self._sources, catalogue, place, self.reporter.decided)
        self.reporter.decide_rest = functools.partial(self._decider.decide, self.patches.all)
        shipped, patch_set = catalogue.get("shipped", ()), self._decider.patch_set
        self._applier = Applier(self.patches, self._sources, root, self.reporter, patch_set, shipped)
        self._looked_at = {module_of(name) for state in self.patches.all for name in state.patch.names}
        self._applied: list[PatchState] = []  # since an outermost import ended
        self._looked_for_gone = False
        self._refused: list[PatchState] = []  # likewise

    def begin(self) -> None:
        """Serve: this is the process's one runtime."""
        os.register_at_fork(before=self.reporter.about_to_fork, after_in_child=self._forked)
        atexit.register(self.reporter.close)
        self.reporter.before_look = lambda: None if wrapping.under_way else guarded(self.look, False)

    # The course of one target's import

    def will_execute(self, module: str) -> None:
        """A target module will be executed by way of us, and not before `before_execution` has come back."""
        self._sources.arriving.add(module)

    def armed_late(self, modules: list[str]) -> None:
        """These were imported before us, and others may hold what they took from them: their patches do not apply."""
        self._decider.too_late_for(modules)
        self._were_imported(modules)
        for module in modules:
            self.before_execution(module)

    def imported_before(self, modules: list[str]) -> None:
        """These were imported before us, and nobody else has run."""
        self._were_imported(modules)
        for module in modules:
            self.before_execution(module)
            self.after_execution(sys.modules[module])

    def _were_imported(self, modules: list[str]) -> None:
        for module in modules:  # at once: to the report's thread, the others would have come past us
            wrapping.executed(sys.modules[module])

    def before_execution(self, module: str, loader: Any = None, origin: str | None = None) -> None:
        """A target module is about to be executed, or was before us: decide about every patch that names it.

        `loader` executes it, and `origin` is its file; None where it was executed before us.
        """
        if loader is not None and self._decider.modules.executing(module, loader, origin):
            self._decide_anew({module}, True)
        self._look_at_relied_on()
        states = [*self.patches.of(module), *self._gone()]
        new = [state for state in states if state.decision is None]
        self._decider.decide(states)
        self._refused += [state for state in new if state.decision is not None and not state.decision.apply]
        self.reporter.imported()

    def _gone(self) -> list[PatchState]:
        """At the first target's import: patches of that package whose modules are all gone. No import names them."""
        if self._looked_for_gone:
            return []
        self._looked_for_gone = True
        origin = self._decider.modules.origin
        waiting = [state for state in self.patches.all if state.decision is None and not state.patch.diff]
        return [
            state
            for state in waiting
            if sys.modules.keys().isdisjoint(state.patch.modules) and not any(map(origin, state.patch.modules))
        ]

    def after_execution(self, module: ModuleType) -> None:
        """A target module has been executed: apply every patch whose target modules are now all there."""
        if sys.modules.get(module.__name__) is not module:
            self._sources.arriving.discard(module.__name__)
            return  # somebody's private copy: no caller reaches it by its name
        wrapping.executed(module)
        states = sorted(self.patches.of(module.__name__), key=lambda state: not state.patch.diff)
        failed = [state for state in states if not self._apply_where_loaded(state)]
        if failed:
            self.reporter.not_applied(*failed)
        for state in states:
            if state.state == "failed":  # then those that it would have been instead of
                left_out = [one for one in self.patches.all if one.patch.name in state.patch.order.instead_of]
                self._refused_after_all((one for one in left_out if one.reason == "replaced"), True)
        self._look_at_relied_on()
        self.reporter.imported()
        self.reporter.soon(_RECHECK_SECONDS)

    def _apply_where_loaded(self, state: PatchState) -> bool:
        """Apply a patch, if it is to be, whose target modules are all there. False where it fails."""
        decision = state.decision
        if decision is None or not decision.apply or state.state == "failed":
            return True
        loaded = [name for name in state.targets if wrapping.is_loaded(module_of(name))]
        if state.patch.diff:
            self._read_back(state)
        elif loaded and (state.patch.per_module or len(loaded) == len(state.targets)):
            self._applier.apply(state, loaded)
        else:
            return True
        if state.state == "failed":
            return False
        self._applied.append(state)
        return True

    def look(self, importing: bool) -> None:
        """Find the targets that were loaded past us, and the code that came from elsewhere than it was looked at.

        `importing`: an outermost import has ended. Then it also finds what was put in the place of our wrappers in that
        import, and strict may end the process. Otherwise the process serves.
        """
        for state in self.patches.all:
            if state.state in ("armed", "applied"):
                past = {module: how for module in state.patch.modules if (how := self._how_past(state, module))}
                if past:
                    self._passed_by(state, past, importing)
        moved = self._decider.modules.moved(self._looked_at)
        if moved:
            self._decide_anew(moved, importing)
        if importing:
            self._refused.clear()
            applied, self._applied = self._applied, []
            for state in applied:
                self._read_back_again(state)
            self._look_at_relied_on()

    def program(self, module: str) -> None:
        """A target module is about to run as the program: nothing of it can be wrapped when it has run.

        A diff can be made: runpy executes what the loader gives it.
        """
        for state in self.patches.of(module):
            if state.state in ("armed", "applied") and not state.patch.diff:
                self._passed_by(state, {module: _AS_PROGRAM}, True)
        self.reporter.imported()

    def _how_past(self, state: PatchState, module: str) -> str | None:
        if not state.patch.diff and wrapping.is_program(module):
            return _AS_PROGRAM
        on_its_way = module in self._sources.arriving and not wrapping.has_run(module)  # in another thread
        return None if on_its_way else wrapping.passed_by(module)

    def _passed_by(self, state: PatchState, past: Mapping[str, str], importing: bool) -> None:
        """Target modules of the patch are loaded, and not by way of us: it is not applied, if it would have been."""
        for module in past:
            self._decider.modules.passed_by(module)
        first = state.decision is None
        if first:
            self._decider.decide_anew(state, notify=False)
        decision = state.decision
        assert decision is not None
        how = [f"{module} {past[module]}" for module in past if module in map(module_of, state.targets)]
        if decision.wanted and how:
            if state.patch.diff:
                others = functools.partial(self._give_up, but=state.patch.name)
                self._sources.drop(min(past), f"{state.patch.name} came too late", set(sys.modules), others)(True)
            self._applier.unapply(state, "bypassed", "; ".join([*how, decision.detail]))
        if first and importing:
            self.reporter.decided(state)
        if state.state == "failed" and (decision.apply or not (first and importing)):
            self.reporter.not_applied(state, importing=importing)

    def _decide_anew(self, modules: set[str], importing: bool) -> None:
        """These modules are executed from elsewhere than they were looked at: what was decided on them may not hold.

        A patch that was refused is applied after all within the outermost import in which it was: later, what it would
        have seen from the beginning has begun without it.
        """
        for state in self.patches.all:
            before, names = state.decision, modules.intersection(map(module_of, state.patch.names))
            if before is None or state.state == "failed" or not names:
                continue
            if state.patch.diff and before.apply:
                why = f"executed from elsewhere than they were looked at: {', '.join(sorted(names))}"
                self._sources.drop(min(names), why, set(sys.modules), self._give_up)(True)
                continue
            late = state not in self._refused and any(map(wrapping.is_loaded, state.patch.modules))
            if not before.apply and late and names.isdisjoint(state.patch.modules):
                continue
            self._decider.decide_anew(state)
            decision = state.decision
            if decision is None:
                continue
            if decision.apply and not before.apply:
                self._apply_after_all(state, importing)
                continue
            reason, detail = decision.reason, decision.detail
            if decision.apply and _differs(decision, before):
                reason, detail = "drifted", f"{', '.join(sorted(names))} came with code of another form: {detail}"
            elif decision.apply or not before.apply:
                continue
            if state.applied:
                self._applier.unapply(state, reason, detail)
            if state.missing:
                self.reporter.not_applied(state, importing=importing)

    def _apply_after_all(self, state: PatchState, importing: bool) -> None:
        """Apply a patch that was refused before, and the patches that apply only beside one of traced code."""
        if not self._apply_where_loaded(state):
            self.reporter.not_applied(state, importing=importing)
        if state.patch.traced:
            self._refused_after_all((one for one in self.patches.all if one.patch.auto == "traced"), importing)

    def _refused_after_all(self, states: Iterable[PatchState], importing: bool) -> None:
        """Decide anew on those of these that were refused, and apply what applies now."""
        for state in states:
            if state.decision is not None and not state.decision.apply:
                self._decider.decide_anew(state)
                self._apply_where_loaded(state)
                if state.missing:
                    self.reporter.not_applied(state, importing=importing)

    def _read_back_again(self, state: PatchState) -> None:
        """The outermost import in which a patch was applied has ended: was a target replaced as it was imported?"""
        overtaken = ((step, wrapping.overtaken_by(step)) for step in state.applied)
        step, by = next(((step, by) for step, by in overtaken if by is not None), (None, None))
        with self.patches.lock:
            lost = step is not None and state.state == "applied"
            if lost and step is not None:
                state.settle("failed", "overwritten", f"{step.target} was replaced as it was imported, by {by}")
            seen = state.state == "failed" and state.reason == "overwritten"  # by the report's thread
        if lost or (seen and self.patches.environment.ends(state.patch)):
            self.reporter.not_applied(state)

    def _look_at_relied_on(self) -> None:
        """Before the report's thread does, which ends nothing under strict."""
        for state in self._applier.look_at_relied_on():
            self.reporter.not_applied(state)

    def out_of_reach(self, module: str, why: str) -> None:
        """A target module is being loaded in a way that does not notify us when it has run."""
        for state in self.patches.of(module):
            if state.decision is not None and state.decision.apply and state.state != "failed":
                self._applier.unapply(state, "loader", f"{module} cannot be patched, {why}")
                self.reporter.not_applied(state)
        self.reporter.imported()

    # Source changes

    def changed(self, module: str) -> ChangedModule | None:
        """What the module is to be made of, None where its own source stands."""
        return self._sources.module(module)

    def added(self, module: str) -> ModuleSpec | None:
        """The spec of a module that only a diff has."""
        if any(module in state.patch.added for state in self.patches.all):
            guarded(self.before_execution, module)
        return self._sources.added(module)

    def is_gone(self, module: str) -> bool:
        """Whether it was decided that this module, which diffs would add, is not there. Waits for nothing."""
        of = [state.patch.name for state in self.patches.all if module in state.patch.added]
        return self._decider.decided_on.issuperset(of) and self._sources.module(module) is None

    @part_of_import
    def execute(self, module: ModuleType, loader: Any, changed: ChangedModule) -> None:
        """Execute the changed source as the module. Where it raises, the module works as it came."""
        self._sources.execute(module, loader, changed, self._give_up)

    def _give_up(self, patches: list[str], why: str, stay: set[str], but: str = "") -> End:
        detail = f"{why}; loaded earlier, and so still as changed: {', '.join(sorted(stay))}" if stay else why
        states = [state for state in self.patches.all if state.patch.name in patches and state.patch.name != but]
        before = [(state.state, state.reason, state.detail) for state in states]
        for state in states:
            state.settle("failed", "raised", detail)
        self._decide_on_wrappers(states)

        def end(works: bool) -> None:
            if works:
                for state in states:
                    self.reporter.not_applied(state)
            else:
                for state, was in zip(states, before, strict=True):
                    state.settle(*was)
                self._decide_on_wrappers(states)

        return end

    def _decide_on_wrappers(self, diffs: Iterable[PatchState]) -> None:
        """Decide anew on the wrappers of modules whose text is another since these diffs were dropped, or put back."""
        modules = {module for state in diffs for module in state.patch.modules}
        for state in self.patches.all:
            if not state.patch.diff and state.decision is not None and modules.intersection(state.patch.modules):
                self._decider.decide_anew(state)

    def _read_back(self, state: PatchState) -> None:
        """A source change is applied when what callers import was made of it; modules not imported yet will be."""
        loaded, of, wrong = self._sources.count_loaded(state.patch.name)
        if wrong is not None:
            state.settle("failed", "readback", f"{wrong}, looked up again, was not made of the changed source")
        else:
            state.settle_applied(loaded, of, "modules")

    def _forked(self) -> None:
        self.patches.new_lock()
        for state in self.patches.all:
            if state.context is not None:
                state.context.forget()
        self.reporter.forked_child()


def _differs(one: Decision, other: Decision) -> bool:
    """Whether a patch's code was told other things by one decision than by another that applies it as well."""
    if one.variant is None or other.variant is None:
        return one.variant is not other.variant
    return one.variant.facts != other.variant.facts or one.variant.code.keys() != other.variant.code.keys()


def guarded(step: Callable[..., None], *args: Any) -> None:
    """Whatever goes wrong in here, the target is imported."""
    try:
        step(*args)
    except Exception as error:
        to_stderr(f"an error of its own, please report it: {type(error).__name__}: {error}")
