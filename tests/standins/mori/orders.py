"""What the tests order: the end of each transfer that is begun from now on."""

from __future__ import annotations

import threading
from collections.abc import Callable

AT_ONCE = "at once"
LATE = "late"
"""When `release()` is called."""
FAILED = "failed"
NEVER = "never"
IN_WAIT = "in wait"
"""Only within `Wait()`, as some releases of mori complete a transfer between GPUs of one machine (XGMI)."""
REFUSED = "refused"
"""The call that begins the transfer raises."""

Ends = Callable[[int], str]

_ends: Ends = lambda number: AT_ONCE  # noqa: E731
_begun = 0
_late: list[Callable[[], None]] = []
_lock = threading.Lock()


def let(ends: str | Ends) -> None:
    """Order the end of the transfers from now on: one for all, or a function of their number, counted from 0."""
    global _ends, _begun
    with _lock:
        _ends = ends if callable(ends) else lambda number: ends
        _begun = 0


def begun() -> int:
    """How many transfers were begun since the last order."""
    return _begun


def release() -> None:
    """Complete all transfers that are late."""
    with _lock:
        waiting, _late[:] = _late[:], []
    for complete in waiting:
        complete()


def next_end(complete: Callable[[], None]) -> str:
    """The end of the transfer that begins now. For `mori.io`."""
    global _begun
    with _lock:
        end = _ends(_begun)
        _begun += 1
        if end == LATE:
            _late.append(complete)
    return end
