"""Decides on the patches of this process, each once: what is installed and imported here, and what is asked for."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from . import cache, installed
from .changes import Change, HunkError
from .decision import Decision, Patch, decide, module_of
from .patch_state import PatchState, PatchStates
from .source_changes import Made, SourceChanges, TooLate, no_place


class Decider:
    """`on_decided` is called once for each patch, after it was decided on, without the lock."""

    def __init__(
        self,
        patches: PatchStates,
        sources: SourceChanges,
        catalogue: dict[str, Any],
        place: str | None,
        on_decided: Callable[[PatchState], None],
    ) -> None:
        """`place` is the cache directory, None where there is none."""
        self._patches = patches
        self._sources = sources
        self._digests: dict[str, str] = catalogue["digests"]
        self._changes: dict[str, list[Any]] = catalogue["changes"]
        self._texts: installed.Texts = catalogue.get("texts", {})
        self._on_decided = on_decided
        self.modules = installed.Process()
        self._fingerprints = cache.Fingerprints(place)
        self._too_late: frozenset[str] = frozenset()
        self._pending: list[PatchState] = []  # decided on, and `on_decided` not called yet
        self.decided_on: set[str] = set()  # patches, by name

    def too_late_for(self, modules: Iterable[str]) -> None:
        """These modules are not patched any more: others may hold what they took from them."""
        self._too_late = frozenset(modules)

    def decide(self, states: Iterable[PatchState]) -> None:
        """Source changes first, all of the packages', and those of modules of others that the patches call: wrappers
        are decided on, and wrap, what those make of it.
        """
        states = list(states)
        packages = {state.patch.package for state in states}
        modules = {module_of(name) for state in states for name in state.patch.names}
        changes = [
            state
            for state in self._patches.all
            if state.patch.diff and (state.patch.package in packages or not modules.isdisjoint(state.patch.modules))
        ]
        for state in [*changes, *(state for state in states if not state.patch.diff)]:
            if state.decision is None:
                self.decide_anew(state)
            self._call_on_decided()

    def decide_anew(self, state: PatchState, notify: bool = True) -> None:
        """Two threads may both work it out, so that neither waits for the other; what the first one found counts.

        Where `notify` is false, `on_decided` is the caller's affair.
        """
        patch, before = state.patch, state.decision
        while True:
            texts = self._sources.texts
            decision, releases, made = self._worked_out(patch)
            with self._patches.lock:
                if state.decision is not before:
                    return
                if self._sources.texts is not texts:  # it was worked out on what is no longer so
                    continue
                if made is not None:
                    self._sources.put(patch.name, made)
                self._patches.packages.update(releases)
                state.decision = decision
                if not decision.apply:
                    state.settle("skipped", decision.reason, decision.detail)
                elif state.applied and state.state == "applied":
                    state.settle_applied(len(state.applied), len(state.targets), "targets")
                elif decision.reason != "needed":
                    state.settle("armed", decision.reason, decision.detail)
                elif state.state == "skipped":  # by the decision before this one
                    state.settle("armed")
                if before is None:
                    self.decided_on.add(patch.name)
                    if notify:
                        self._pending.append(state)
                return

    def _worked_out(self, patch: Patch) -> tuple[Decision, dict[str, str | None], Made | None]:
        """The decision, the releases that were found, and what a diff that applies makes. Reads files, may import."""
        releases: dict[str, str | None] = {}
        made = None
        try:
            tree = self.modules
            changed = tree if patch.diff else installed.Overlay(tree, self._sources.texts, self._sources.diffs())
            found = installed.look(patch, changed, self._fingerprints.of_names, self._texts)
            releases = {patch.package: found.release, **found.companions}
            traced = patch.auto == "traced" and bool(self.patch_set())
            instead = self._instead_of(patch)
            environment = dataclasses.replace(self._patches.environment, traced=traced, instead=instead)
            decision = decide(patch, found, environment)
            early = sorted(self._too_late.intersection(map(module_of, patch.targets_of(decision.variant))))
            if decision.apply and early:
                detail = f"imported before the bundle was armed: {', '.join(early)}"
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

    def _call_on_decided(self) -> None:
        while self._pending:
            with self._patches.lock:
                state = self._pending.pop(0) if self._pending else None
            if state is not None:
                self._on_decided(state)

    def _instead_of(self, patch: Patch) -> str:
        """The patch that is applied instead of this one; empty where there is none."""
        others = [state for state in self._patches.all if patch.name in state.patch.order.instead_of]
        for state in (state for state in others if state.decision is None):
            if state.patch.diff:  # those of its package are being decided on
                self.decide_anew(state)
            else:
                self.decide([state])
        applied = (state for state in others if state.decision is not None and state.decision.apply)
        return next((state.patch.name for state in applied if state.state != "failed"), "")

    def patch_set(self) -> str:
        """What the patches make of the code that torch.compile traces, as a digest; empty where they leave it alone.

        Decided on now, also for modules that are imported later or elsewhere: it must be the same in all processes.
        """
        traced = [state for state in self._patches.all if state.patch.traced]
        options = self._patches.environment.options
        self.decide(traced)
        parts = [
            f"{state.patch.name} {self._digests[state.patch.name]} {options[state.patch.name]}"
            for state in traced
            if state.decision is not None and state.decision.apply and state.state != "failed"
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""
