"""An API server sends a request of an id when it has seen the end of the former request of that id.

It forgets a request whose client hung up, or which ends at a stop string, before the engine core has heard. Outputs of
that request may travel, and the release tells outputs apart by id alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

ATTRIBUTE = "_livepatch_endings"
"""Attribute of an OutputProcessor that serves an AsyncLLM: its `Endings`."""

WAIT_SECONDS = 60.0
"""How long a request waits for the end of the former one, at most. It is refused then, for it may still come."""

LOOK_SECONDS = 1.0
"""How often a request that waits looks whether the engine is dead."""

REMEMBERED = 65536
"""How many requests are remembered whose end was not seen: the engine core tells of each."""


class Endings:
    """The requests that one API server has forgotten before their end was seen, by id, oldest first."""

    def __init__(self) -> None:
        self.awaited: OrderedDict[str, asyncio.Event] = OrderedDict()

    def forgotten(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.awaited.setdefault(request_id, asyncio.Event())
            if len(self.awaited) > REMEMBERED:
                self.awaited.popitem(last=False)[1].set()

    def seen(self, outputs: Iterable[Any]) -> None:
        """Look for ends in outputs of the engine core; it asks for none where nothing is awaited."""
        if self.awaited:
            for output in outputs:
                if output.finish_reason is not None and output.request_id in self.awaited:
                    self.awaited.pop(output.request_id).set()

    async def over(self, request_id: str, dead: Callable[[], bool]) -> bool:
        """Wait for the end of a former request of this id; False where it was not seen in time."""
        until = time.monotonic() + WAIT_SECONDS
        while request_id in self.awaited and not dead():
            left = until - time.monotonic()
            if left <= 0:
                return False
            try:
                await asyncio.wait_for(self.awaited[request_id].wait(), min(left, LOOK_SECONDS))
            except (TimeoutError, asyncio.TimeoutError):
                continue
        return True
