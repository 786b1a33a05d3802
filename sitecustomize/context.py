"""What a patch's own code is given: its options, the facts of the variant it met, its counters, and a voice."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

SAY_EVERY_SECONDS = 30.0


class PatchContext:
    """`changed` is called after every count, so that the report follows."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        facts: Mapping[str, Any],
        changed: Callable[[], None],
        patch_set: Callable[[], str] = lambda: "",
        asked: bool = False,
    ) -> None:
        self.name = name
        self.options = options
        self.facts = facts
        self.asked = asked  # by name, with `on` or `force`: also where it is not needed by default
        self.counters: dict[str, int] = {}
        self.patch_set = patch_set  # a digest of what patches make of code that torch.compile traces
        self._changed = changed
        self._said: dict[str, tuple[float, int]] = {}  # kind: when, and how often since

    def count(self, kind: str, number: int = 1) -> None:
        """Add to a counter that `status` shows."""
        self.counters[kind] = self.counters.get(kind, 0) + number
        self._changed()

    def say(self, kind: str, message: str) -> None:
        """One line on stderr, at most one every 30 seconds for each kind; what was held back is counted."""
        now = time.monotonic()
        when, held_back = self._said.get(kind, (float("-inf"), 0))
        if now - when < SAY_EVERY_SECONDS:
            self._said[kind] = (when, held_back + 1)
            return
        self._said[kind] = (now, 0)
        more = f" ({held_back} more like it since the last line)" if held_back else ""
        to_stderr(f"{self.name}: {message}{more}")

    def forget(self) -> None:
        """Begin anew, as a forked child does."""
        self.counters.clear()
        self._said.clear()


def to_stderr(message: str) -> None:
    """One line, whole or not at all: processes that share a stderr do not mix theirs, and a closed one hurts nobody."""
    line = f"vllm-livepatch: {message}\n"
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no stderr, or a closed one
        try:
            descriptor = sys.stderr.fileno()
        except (OSError, ValueError):  # somebody's own, without a file
            sys.stderr.write(line)
            sys.stderr.flush()
            return
        sys.stderr.flush()
        # In one piece, and past the buffer: what that cannot write becomes the process's exit code, 120.
        os.write(descriptor, line.encode("utf-8", "backslashreplace"))
