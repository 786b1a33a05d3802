"""The socket of a transfer request: whether the request has left this process, and whether its connection stands.

A port that refuses connections, or is silent, does not show that the prefill engine's process has ended: it only shows
that a request which has not left cannot be sent now.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

KEEPALIVE = {"TCP_KEEPALIVE": 1, "TCP_KEEPALIVE_IDLE": 60, "TCP_KEEPALIVE_INTVL": 60, "TCP_KEEPALIVE_CNT": 127}
"""ZMQ's options. A host that started again ends a connection of before at the next probe. Without probes a connection
to a host that vanished would stand for ever; with these it ends after two hours of silence."""


class Line:
    """One socket of ZMQ's, that the original made for a transfer request to one worker of prefill's.

    `overdue` says, when the original's time for an answer is over, whether to listen on. `kept` says, when the original
    closes the socket, whether its connection is watched further; `end` closes it then.
    """

    def __init__(self, made: Any, overdue: Callable[[], bool], kept: Callable[[], bool]) -> None:
        self._made, self._overdue, self._kept = made, overdue, kept
        self._send, self._receive, self._close = made.send, made.recv, made.close
        self._sent: asyncio.Future[Any] | None = None
        self._closed_since: float | None = None
        self.lease = float("inf")
        """Seconds that the original waits for an answer; beyond it, from 0.30.0 on, the original frees the blocks."""
        self.heard = time.monotonic()
        """When the request left, or when the last answer came, by `time.monotonic()`."""
        zmq = sys.modules["zmq"]
        # ZMQ then takes a message only where a connection stands: a request that it has not taken has not left.
        for option, value in {"IMMEDIATE": 1, **KEEPALIVE}.items():
            made.setsockopt(getattr(zmq, option), value)
        made.send, made.recv, made.close = self._ask, self._answer, self._end_or_keep

    @property
    def left(self) -> bool:
        """Whether the request may have left this process."""
        sent = self._sent
        return sent is not None and sent.done() and not sent.cancelled() and sent.exception() is None

    def is_closed(self) -> bool:
        """Whether the connection was closed, and no new one is accepted: ZMQ itself tries, ten times a second."""
        zmq = sys.modules["zmq"]
        if self._made.get(zmq.EVENTS) & zmq.POLLOUT:
            self._closed_since = None
        elif self._closed_since is None:
            self._closed_since = time.monotonic()
        return self._closed_since is not None

    def closed_for(self) -> float:
        """Seconds since which `is_closed` has found no connection; 0 where it found one."""
        return 0.0 if self._closed_since is None else time.monotonic() - self._closed_since

    def end(self) -> None:
        self._close()

    def _ask(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        if self._made.rcvtimeo >= 0:
            self.lease = self._made.rcvtimeo / 1000
        self._made.sndtimeo = self._made.rcvtimeo
        self._sent = asyncio.ensure_future(self._send(*args, **kwargs))
        self._sent.add_done_callback(self._has_heard)
        return self._sent

    async def _answer(self, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = await self._receive(*args, **kwargs)
        except sys.modules["zmq"].Again:
            if not self._overdue():
                raise
            self._made.rcvtimeo = -1
            answer = await self._receive(*args, **kwargs)
        self._has_heard()
        return answer

    def _has_heard(self, *done: Any) -> None:
        self.heard = time.monotonic()

    def _end_or_keep(self, *args: Any, **kwargs: Any) -> None:
        if not self._kept():
            self._close(*args, **kwargs)


class Lines:
    """In the place of a worker's ZMQ context: `opened` gets each socket that is made."""

    def __init__(self, own: Any, opened: Callable[[Any], None]) -> None:
        self._own, self._opened = own, opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def socket(self, *args: Any, **kwargs: Any) -> Any:
        made = self._own.socket(*args, **kwargs)
        self._opened(made)
        return made


class Ports:
    """Tries whether ports refuse connections. Requests that ask about one port at the same time share one try.

    Where to is what a bootstrap server says, and that is one that a client names.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tries: dict[tuple[Any, str], asyncio.Future[bool]] = {}

    async def refuses(self, address: str) -> bool:
        """Whether `address` (`tcp://HOST:PORT`) refuses a connection. False where it is silent."""
        key = asyncio.get_running_loop(), address
        if key not in self._tries:
            self._tries[key] = asyncio.ensure_future(_refuses(address, self._seconds))
            self._tries[key].add_done_callback(lambda _: self._tries.pop(key))
        return await asyncio.shield(self._tries[key])


async def _refuses(address: str, seconds: float) -> bool:
    try:
        place = urlsplit(address)
        _, writer = await asyncio.wait_for(asyncio.open_connection(place.hostname, place.port), seconds)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError, ValueError):  # ZMQ takes addresses that name no place, and tries for ever
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False
