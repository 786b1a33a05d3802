"""Whether a worker of a prefill engine is gone: its process has ended, and cannot write any more.

Its host says so itself: it refuses connections to the port at which the worker listened for as long as it lived. A peer
that is stopped, busy or behind a broken network answers or does not; it may come back, and write.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from urllib.parse import urlsplit

WATCHED = 5
"""Looks that are further apart than so many times LOOK_SECONDS do not belong together: another may have lived since."""


class Peers:
    """What is known of addresses (`tcp://HOST:PORT`). Each is looked at once in `seconds`, whoever asks."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._looked: dict[str, float] = {}  # when it was looked at last, by time.monotonic()
        self._refused: dict[str, tuple[float, float]] = {}  # the first and the last look since which it refuses

    async def gone(self, address: str) -> bool:
        """Whether it refuses, and refused a look before.

        What a process wrote just before its end may still be on its way into our memory when it is first seen to be
        gone. It is at most what the sockets hold, and between two looks they are emptied.
        """
        now = time.monotonic()
        if now - self._looked.get(address, float("-inf")) >= self._seconds:
            self._looked[address] = now
            if await _refuses(address, self._seconds):
                first, last = self._refused.get(address, (now, now))
                self._refused[address] = (first if now - last < WATCHED * self._seconds else now, now)
            else:
                self._refused.pop(address, None)
        first, last = self._refused.get(address, (now, now))
        # Another's look may be under way, at one that was gone before: then nothing is known.
        return last == self._looked[address] and last - first >= self._seconds


async def _refuses(address: str, seconds: float) -> bool:
    place = urlsplit(address)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(place.hostname, place.port), seconds)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False
