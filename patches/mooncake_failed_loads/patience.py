"""Of each ask it is known whether it was sent; and an answer that did not come in the release's time is listened for
beyond it: it ends what may be written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Patience:
    """In the place of a worker's ZMQ context. `overdue` says, when the time of an ask is over, whether to listen on.

    `sending` is called before anything of an ask is sent.
    """

    def __init__(self, own: Any, overdue: Callable[[], bool], sending: Callable[[], None]) -> None:
        self._own, self._overdue, self._sending = own, overdue, sending

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def socket(self, *args: Any, **kwargs: Any) -> Any:
        made = self._own.socket(*args, **kwargs)
        receive, send = made.recv, made.send

        def ask(*args: Any, **kwargs: Any) -> Any:
            self._sending()
            return send(*args, **kwargs)

        async def answer(*args: Any, **kwargs: Any) -> Any:
            try:
                return await receive(*args, **kwargs)
            except sys.modules["zmq"].Again:
                if not self._overdue():
                    raise
            made.rcvtimeo = -1
            return await receive(*args, **kwargs)

        made.recv, made.send = answer, ask
        return made
