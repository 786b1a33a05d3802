"""What an engine may meet without a fault of anybody's: clocks that run far, and a process that has nothing left."""

from __future__ import annotations

import _thread
import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn


class Clock:
    """The clocks of this process, which are `ahead` by so many seconds from now on. Whatever sleeps or waits is not woken."""

    def __init__(self) -> None:
        self.ahead = 0.0
        for name in ("monotonic", "perf_counter", "time"):
            setattr(time, name, self._seconds(getattr(time, name)))
            setattr(time, f"{name}_ns", self._nanoseconds(getattr(time, f"{name}_ns")))
        time.clock_gettime = self._seconds(time.clock_gettime)

    def _seconds(self, read: Callable[..., float]) -> Callable[..., float]:
        return lambda *which: read(*which) + self.ahead

    def _nanoseconds(self, read: Callable[[], int]) -> Callable[[], int]:
        return lambda: read() + int(self.ahead * 1e9)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No thread can be started, and no file or socket opened, as where the limits of a container are reached."""
    starts = _thread.start_new_thread, threading._start_new_thread  # type: ignore[attr-defined]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    _thread.start_new_thread = threading._start_new_thread = refuse  # type: ignore[attr-defined]
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free(), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        _thread.start_new_thread, threading._start_new_thread = starts  # type: ignore[attr-defined]


def refuse(*_: Any, **__: Any) -> NoReturn:
    """Start no thread, as the interpreter says it."""
    raise RuntimeError("can't start new thread")


def first_free() -> int:
    """The lowest number that no open file has: with it as the limit, none can be opened."""
    number = os.dup(0)
    os.close(number)
    return number
