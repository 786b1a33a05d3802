"""Applies a patch whose target modules are imported: makes its wrappers, and puts all of them in place or none."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from . import covered, guard, nesting, no_function, patch_code, wrapping
from .context import PatchContext
from .decision import Patch
from .outcomes import Reporter
from .patch_state import PatchState, PatchStates
from .relied_on import RELIED_ON, ReliedOn
from .source_changes import SourceChanges

_Found = TypeVar("_Found")
_FLUSH_SECONDS = 1.0
"""How old the report may be when a counter has changed."""


class Applier:
    """`patch_set` is what each patch's context gives its code by that name."""

    def __init__(
        self,
        patches: PatchStates,
        sources: SourceChanges,
        root: str,
        reporter: Reporter,
        patch_set: Callable[[], str],
        shipped: Collection[str] = (),
    ) -> None:
        """`root` is the package that the patches' code is imported from; `shipped` are those that fit each other."""
        self._patches = patches
        self._sources = sources
        self._root = root
        self._reporter = reporter
        self._patch_set = patch_set
        self._shipped = frozenset(shipped)

    def apply(self, state: PatchState, targets: Sequence[str]) -> None:
        """Apply the patch to these of its targets; whatever goes wrong is in `state` afterwards."""
        try:
            context = self._context(state)
            made = state.wrappers = state.wrappers or self._made(state.patch, context)
            if set(made) != set(state.patch.targets):
                raise wrapping.ApplyError("mismatch", "its code wraps other targets than its patch.toml names")
            if state.relied_on is None:
                state.relied_on = ReliedOn(state.patch.calls, self._sources.files)
            forced = state.decision is not None and state.decision.reason == "forced"
            replaced = None if forced else state.relied_on.replaced(self._patches.wrappers())
            if replaced is not None:
                raise wrapping.ApplyError(RELIED_ON, replaced)
            wanted = {target: made[target] for target in targets}
            while not patiently(lambda: self._put_around(state, context, wanted)):
                pass  # another thread was faster: on what it left
        except wrapping.ApplyError as error:
            self.unapply(state, error.reason, error.detail)
        except (Exception, SystemExit) as error:  # a patch may end itself, not the process
            self.unapply(state, "raised", f"{type(error).__name__} while applying: {error}")

    def unapply(self, state: PatchState, reason: str, detail: str) -> None:
        """All or nothing, also where the targets came one by one, or one of them once more."""
        with self._patches.lock:
            steps, state.applied = state.applied, []
            wrapping.undo(step for step in steps if wrapping.in_place(step))
            state.settle("failed", reason, detail)
        if steps and state.context is not None:  # who took our wrapper by name still calls it
            state.context.withdraw()

    def look_at_relied_on(self) -> list[PatchState]:
        """Take back every patch whose code relies on what is another's now; those patches.

        Of patches that end the process those too that the report's thread has found: it ends nothing, since it may
        look while one serves.
        """
        lost = []
        for state in self._patches.all:
            replaced = None
            if state.state == "applied" and state.relied_on is not None:
                replaced = state.relied_on.replaced(self._patches.wrappers())
            if replaced is not None:
                self.unapply(state, RELIED_ON, replaced)
            if replaced is not None or (state.reason == RELIED_ON and self._patches.environment.ends(state.patch)):
                lost.append(state)
        return lost

    def _context(self, state: PatchState) -> PatchContext:
        """What the patch's code is given, the same each time."""
        patch, decision, environment = state.patch, state.decision, self._patches.environment
        assert decision is not None
        with self._patches.lock:
            if state.context is None:
                state.context = PatchContext(
                    patch.name,
                    environment.options[patch.name],
                    {} if decision.variant is None else decision.variant.facts,
                    functools.partial(self._reporter.soon, _FLUSH_SECONDS),
                    self._patch_set,
                    environment.toggles.get(patch.name) in ("on", "force"),
                    functools.partial(self._raised, state),
                )
            return state.context

    def _made(self, patch: Patch, context: PatchContext) -> dict[str, Callable[..., Any]]:
        wrappers = patiently(lambda: patch_code.load(self._root, patch.name).wrappers)
        return dict(wrappers(context))

    def _put_around(self, state: PatchState, context: PatchContext, made: dict[str, Callable[..., Any]]) -> bool:
        """Whether the wrappers are in place, or have no place any more; False where another thread came in between.

        Raises ApplyError.
        """
        applied = state.applied
        before = [other.applied for other in self._patches.all]
        known = [step for steps in before for step in steps]
        # All but a reloaded module's; another patch, or somebody else, may have wrapped them since.
        own = [step for step in applied if wrapping.overtaken_by(step) is None]
        there = {step.target for step in own}
        wrappers = {target: wrapper for target, wrapper in made.items() if target not in there}
        forced = state.decision is not None and state.decision.reason == "forced"
        over = nesting.over(wrappers, self._patches.outer[state.patch.name], self._patches.all)
        stand_in = functools.partial(self._stand_in, state)
        try:
            files, beneath = self._sources.files(), nesting.beneath(over)
            planned = wrapping.planned(wrappers, stand_in, known, files, forced, beneath)
            again = nesting.again(over, planned, functools.partial(self._made_again, state.patch.name))
        except wrapping.ApplyError:
            with self._patches.lock:  # somebody else's may be what another thread of ours has put there
                if any(other.applied is not steps for other, steps in zip(self._patches.all, before, strict=True)):
                    return False
            raise
        with self._patches.lock:
            if context.aside:  # a target that was there before has raised meanwhile
                return True
            as_planned = (step.target in beneath or wrapping.is_as_planned(step) for step in planned)
            if state.applied is not applied or not nesting.are_there(over) or not all(as_planned):
                return False
            nesting.put(planned, over, again)
            state.applied = own + planned  # whoever comes now leaves these to this thread
            changes = [step for step in planned if step.by is not None]
            if not changes:
                state.settle_applied(len(state.applied), len(state.targets), "targets")
        for step in changes:
            context.on_stand_aside(functools.partial(wrapping.put_back, step))
            wrapping.change(step)
        with self._patches.lock:
            if changes and state.state != "failed":
                state.settle_applied(len(state.applied), len(state.targets), "targets")
        return True

    def _stand_in(
        self, state: PatchState, original: Any, wrapper: Callable[..., Any], target: str, inner: Sequence[str] = ()
    ) -> Any:
        """What stands at a target. `inner`: patches whose wrappers stand beneath, and are not in place yet."""
        context = self._context(state)
        beneath = {*inner, *(one.state.patch.name for one in nesting.standing(original, self._patches.all))}
        if beneath and not self._shipped.issuperset({state.patch.name, *beneath}):
            passed = functools.partial(self._passed, original, target, state.patch.name)
            wrapper = covered.watched(wrapper, context, passed)
        if isinstance(wrapper, no_function.Proxy):
            return no_function.in_place_of(original, wrapper, context, target)
        return guard.in_place_of(original, wrapper, context, target)

    def _made_again(self, inner: str, state: PatchState, original: Any, target: str) -> Any:
        return self._stand_in(state, original, state.wrappers[target], target, [inner])

    def _passed(self, original: Any, target: str, by: str) -> None:
        """A patch's wrapper has answered without its original, so without those that stand beneath."""
        for state, _ in nesting.standing(original, self._patches.all):
            if state.context is not None and not self._shipped.issuperset((by, state.patch.name)):
                state.context.passed(target, by)

    def _raised(self, state: PatchState, detail: str) -> None:
        """A wrapper's own error: the patch stands aside. Printed, and no more: what serves already is not ended."""
        with self._patches.lock:
            state.settle("failed", "raised", detail)
        self._reporter.no_longer_applied(state)
        self._reporter.soon(_FLUSH_SECONDS)  # by another thread: the engine waits for no disk


def patiently(step: Callable[[], _Found]) -> _Found:
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
