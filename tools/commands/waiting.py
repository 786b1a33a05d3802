"""While a registry is asked: a line that says so, and an end after `--timeout`."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import registry

QUIET_SECONDS = 1.0
"""A command that answers within these says nothing of its progress."""
_LONGEST = 366 * 86400.0
"""A time-out that no timer takes is a mistake: `inf`, `1e300`."""


class _TimeIsUp(BaseException):
    """No `except Exception` on the way may take it for a failure of its own."""


@contextmanager
def progress() -> Iterator[None]:
    """After a second, a line on stderr that says what is waited for; only in a terminal, and gone at the end."""
    if not sys.stderr.isatty():
        yield
        return
    begun = time.monotonic()

    def line() -> Text:
        traffic = registry.traffic
        had = f"{traffic.answers} answers, {traffic.bytes / 1e6:.1f} MB"
        doing = f"asking {registry.traffic.asking} ({had})" if traffic.asking else "reading and comparing code"
        return Text(f"{doing}, {time.monotonic() - begun:.0f} s")

    live = Live(get_renderable=line, console=Console(stderr=True), refresh_per_second=2, transient=True)
    timer = threading.Timer(QUIET_SECONDS, live.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        live.stop()


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """End what is done within with a UserError after so many seconds. To be called in the main thread."""
    if seconds is None:
        yield
        return
    if not seconds <= _LONGEST:  # nor is nan
        raise UserError(f"--timeout {seconds:g}: up to {_LONGEST:.0f} seconds, a year")

    def ring(*_: Any) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TimeIsUp:
        waited_for = f"; {registry.traffic.asking} did not answer in time" if registry.traffic.asking else ""
        raise UserError(f"not done after the {seconds:g} s of --timeout{waited_for}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
