"""The one line of a process, which says what came of its patches, and the lines that follow it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from . import context

QUIET_SECONDS = 5.0
"""After the last import of a target: what an engine needs at its start comes within a second or two."""
LATEST_SECONDS = 30.0
"""After the last import where no patch was applied yet: `vllm.envs` is imported long before a scheduler."""


class Outcome(NamedTuple):
    """One patch in this process, its version in its name. `missing`: wanted, and not applied."""

    name: str
    state: str
    missing: bool
    proven: bool = False  # it is applied to code that it was proven on, and that no release is known to have


class Greeting:
    """Written once: when the process has stopped importing targets, or another line follows, or it forks or ends.

    `outcomes` and `trouble` are asked for then; `bundle` is its version and digest.
    """

    def __init__(
        self, version: str, bundle: str, outcomes: Callable[[], list[Outcome]], trouble: Callable[[], str]
    ) -> None:
        self._version = version
        self._bundle = bundle
        self._outcomes = outcomes
        self._trouble = trouble
        self._packages: Mapping[str, str | None] = {}
        self._begin()

    def _begin(self) -> None:
        self._last: float | None = None  # time.monotonic() of the last import of a target
        self._lock = threading.Lock()
        self._written = False
        self._behind: list[tuple[str, Callable[[], bool] | None]] = []

    def begin(self, packages: Mapping[str, str | None]) -> None:
        """The first target is being imported; `packages` will have the releases found."""
        self._packages = packages
        self._last = time.monotonic()
        context.before_lines.append(self.say)

    def wait(self) -> None:
        """A target was imported: more of them may follow."""
        self._last = time.monotonic()

    def forked_child(self) -> None:
        """The parent has written its own line. A child that imports a target of its own has one, too; of the parent's
        lock the owner does not exist here.
        """
        self._begin()

    def due_in(self) -> float:
        """Seconds until it is due; infinite where it was, or where no target was imported."""
        if self._last is None or self._written:
            return float("inf")
        anything = any(one.state in ("applied", "failed") for one in self._outcomes())
        return self._last + (QUIET_SECONDS if anything else LATEST_SECONDS) - time.monotonic()

    def behind(self, message: str, holds: Callable[[], bool] | None = None) -> None:
        """Say this, and the process's line first; where it has to wait for that, only if it holds then."""
        with self._lock:
            if not self._written:
                self._behind.append((message, holds))
                return
        context.to_stderr(message)

    def say(self) -> None:
        """Write it, unless it was written, or no target was imported."""
        with self._lock:
            if self._last is None or self._written:
                return
            self._written = True
            behind, self._behind = self._behind, []
        releases = ", ".join(f"{name} {release or 'of unknown release'}" for name, release in self._packages.items())
        head = f"{self._version}, pid {os.getpid()}, {releases}"
        context.line(f"{head}; {self._described()}; LIVEPATCH=off turns it off{self._trouble()}")
        for message, holds in behind:
            if holds is None or holds():
                context.line(message)

    def _described(self) -> str:
        found = self._outcomes()
        applied = ",".join(one.name for one in found if one.state == "applied")
        failed = ",".join(one.name for one in found if one.missing)
        proven = ",".join(one.name for one in found if one.state == "applied" and one.proven)
        applied = f"{applied or '-'} proven={proven}" if proven else applied or "-"
        armed = sum(one.state == "armed" for one in found)
        skipped = sum(one.state == "skipped" and not one.missing for one in found)
        return f"applied={applied} armed={armed} skipped={skipped} failed={failed or '-'} bundle={self._bundle}"
