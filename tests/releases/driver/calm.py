"""A driver's time stands still while its process does.

A busy machine may stop everything for a second or two, in which nobody gets anywhere and every time-out runs. After
`keep()`, what this process and its children take for time, and wait for at most, is time in which it ran.
"""

from __future__ import annotations

import os
import threading
import time

LOOK_SECONDS = 0.02
"""How often a thread notes that the process runs."""
LONGEST = 0.1
"""So many seconds at most pass between two of its looks, however long they were."""

_real, _sleep = time.monotonic, time.sleep
_wait, _join = threading.Event.wait, threading.Thread.join
_passed = (_real(), _real())
"""What the time was at the last look, and what it really was."""


def monotonic() -> float:
    passed, at = _passed
    return passed + min(_real() - at, LONGEST)


def keep() -> None:
    time.monotonic = time.perf_counter = monotonic
    threading.Event.wait = wait  # type: ignore[method-assign]
    threading.Thread.join = join  # type: ignore[method-assign]
    os.register_at_fork(after_in_child=_begin)
    _begin()


def wait(event: threading.Event, timeout: float | None = None) -> bool:
    if timeout is None:
        return _wait(event)
    end = monotonic() + timeout
    while not _wait(event, timeout):
        timeout = end - monotonic()
        if timeout <= 0:
            return event.is_set()
    return True


def join(thread: threading.Thread, timeout: float | None = None) -> None:
    if timeout is None:
        return _join(thread)
    end = monotonic() + timeout
    while True:
        _join(thread, max(timeout, 0.0))
        timeout = end - monotonic()
        if timeout <= 0 or not thread.is_alive():
            return None


def _begin() -> None:
    threading.Thread(target=_look, name="calm", daemon=True).start()


def _look() -> None:
    global _passed
    while True:
        _sleep(LOOK_SECONDS)
        now = monotonic()
        _passed = (now, _real())
