"""What this process knows of its patches: what is asked of each, what was decided, and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from . import order, redaction, settings
from .context import PatchContext
from .decision import Decision, Patch
from .facts import to_patch
from .relied_on import ReliedOn
from .wrapping import Applied


class PatchState:
    """One patch in this process. `state`: armed, applied, skipped or failed."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch
        self.state = "armed"
        self.reason: str | None = None
        self.detail: str | None = None
        self.decision: Decision | None = None
        self.context: PatchContext | None = None
        self.wrappers: dict[str, Callable[..., Any]] = {}  # by target, once the patch's code has made them
        self.applied: list[Applied] = []
        self.relied_on: ReliedOn | None = None  # once it was applied
        self.bypassed: dict[str, None] = {}  # sentences on classes that override its targets, already on stderr

    @property
    def targets(self) -> tuple[str, ...]:
        """Those of the variant that was found; all of them before that."""
        return self.patch.targets_of(None if self.decision is None else self.decision.variant)

    @property
    def missing(self) -> bool:
        """Wanted, and not applied."""
        decision = self.decision
        refused = decision is not None and decision.wanted and not decision.apply
        return self.state == "failed" or (self.state == "skipped" and refused)

    def settle(self, state: str, reason: str | None = None, detail: str | None = None) -> None:
        self.state, self.reason, self.detail = state, reason, detail

    def settle_applied(self, there: int, of: int, parts: str) -> None:
        """Applied to `there` of its `of` parts; the reason says why only to these, or why where it is not needed."""
        decision = self.decision
        if there < of:
            self.settle("applied", "partly", f"{there} of {of} {parts} imported so far")
        elif decision is None or decision.reason == "needed":
            self.settle("applied")
        else:
            self.settle("applied", decision.reason, decision.detail)

    def described(self) -> dict[str, Any]:
        """The object that `status --json` shows for this patch."""
        counted = {} if self.context is None or self.state != "applied" else dict(self.context.covered)
        covered = sorted(counted.items())
        passed = (
            f"passed by {times} times on {target} by {name}, which answered without calling its original"
            for (target, name), times in covered
        )
        detail = "; ".join(filter(None, [self.detail, *passed]))
        return {
            "name": self.patch.name,
            "version": self.patch.version,
            "state": self.state,
            "reason": self.reason or ("covered" if covered else None),
            "detail": redaction.sentence(detail) if detail else self.detail,
            "verdict": None if self.decision is None else self.decision.verdict,
            "targets": [*self.targets, *self.patch.added],
            "counters": {} if self.context is None else dict(self.context.counters),
        }


class PatchStates:
    """All patches of one bundle in one process, and the environment that they are decided in."""

    def __init__(self, facts: Mapping[str, Mapping[str, Any]], environ: Mapping[str, str]) -> None:
        """`facts` of each patch, by its name. Raises PatchError."""
        patches = [to_patch(name, of_patch) for name, of_patch in sorted(facts.items())]
        self.environment = settings.read(patches, environ)
        self.settings = settings.changed_settings(patches, self.environment)  # what differs from the defaults
        self.all = [PatchState(patch) for patch in patches]
        self.outer = order.outer(patches)  # by patch, whose wrappers must stand outside of its own
        by_name = {state.patch.name: state for state in self.all}
        self._inner_first = [by_name[name] for name in order.placed(by_name, self.outer)]
        self.packages: dict[str, str | None] = {}  # releases, by package, once a patch of it was decided on
        self.new_lock()

    def wrappers(self) -> list[Applied]:
        """All that stand at a target."""
        return [step for state in self.all for step in state.applied]

    def of(self, module: str) -> list[PatchState]:
        """The patches of which a target is in this module; whose wrapper stands inside of another's comes first."""
        return [state for state in self._inner_first if module in (*state.patch.modules, *state.patch.added)]

    def new_lock(self) -> None:
        """Over these records; anew in a forked child.

        Never held while anything is imported or read, or while a target's or a patch's code runs: a thread that imports
        may want it, and would be waited for.
        """
        self.lock = threading.RLock()
