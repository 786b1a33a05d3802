"""What became of the requests of a load."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = ("completed", "disconnected", "failed")


@dataclass
class Tally:
    """Filled while the load runs: right also when that is cut short. Its clock runs from ``go`` to ``pause``."""

    events: list[tuple[float, str]] = field(default_factory=list)
    """Seconds of load, and ``completed``, ``disconnected`` or ``failed``."""
    mismatches: int = 0
    """Completions whose output is not the expected one."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failures by kind."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first message of each kind of failure."""
    first_tokens: list[float] = field(default_factory=list)
    """Seconds to the first token of each streamed completion."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens of streamed completions."""
    waits: list[float] = field(default_factory=list)
    """Seconds to the whole answer, or to the failure, of each request that its client did not give up."""
    resets: int = 0
    waves: int = 0
    hang_ups_from: float | None = None
    """The moment of the first wave that is not calm."""
    going: asyncio.Event = field(default_factory=asyncio.Event)
    _before: float = 0.0
    _since: float = 0.0

    def go(self) -> None:
        """The load begins, or goes on."""
        if not self.going.is_set():
            self._since = time.monotonic()
            self.going.set()

    def pause(self) -> None:
        """The load rests: its clock stands still."""
        self._before = self.elapsed()
        self.going.clear()

    def elapsed(self) -> float:
        return self._before + (time.monotonic() - self._since if self.going.is_set() else 0.0)

    def note(self, kind: str) -> None:
        self.events.append((self.elapsed(), kind))

    def fail(self, kind: str, message: str = "") -> None:
        self.note("failed")
        self.errors[kind] += 1
        self.examples.setdefault(kind, message)

    def count(self, kind: str) -> int:
        return sum(1 for _, event in self.events if event == kind)

    def per_second(self, kind: str) -> list[int]:
        """How many in each second, from the first to the last in which anything happened."""
        bins = [0] * (int(max((when for when, _ in self.events), default=-1.0)) + 1)
        for when, event in self.events:
            bins[int(when)] += event == kind
        return bins

    def died_after(self) -> float:
        """Of a load that ended in a death: seconds from the first hang-up to the failure after its last answer."""
        served = max((when for when, kind in self.events if kind == "completed"), default=0.0)
        fatal = [when for when, kind in self.events if kind == "failed" and when >= served]
        failed = min(fatal, default=self.elapsed())
        return round(max(0.0, failed - (self.hang_ups_from or 0.0)), 2)

    def summary(self, seconds: float) -> dict[str, Any]:
        """For JSON; ``seconds`` is how long the load was to last. Goodput is in right answers a second of that."""
        return {
            **{kind: self.count(kind) for kind in KINDS},
            "mismatches": self.mismatches,
            "goodput": round((self.count("completed") - self.mismatches) / seconds, 3),
            "first_token": quantiles(self.first_tokens),
            "between_tokens": quantiles(self.gaps),
            "longest_wait": round(max(self.waits), 1) if self.waits else None,
            "hang_ups_from": self.hang_ups_from,
            "waves": self.waves,
            "prefix_cache_resets": self.resets,
            "errors": dict(self.errors.most_common()),
            "error_examples": self.examples,
            "per_second": {kind: self.per_second(kind) for kind in KINDS},
        }


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 90 % and 99 % of seconds; None where there is nothing."""
    if not values:
        return None
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {str(share): round(cuts[round(share * 100) - 1], 4) for share in (0.5, 0.9, 0.99)}
