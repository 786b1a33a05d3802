"""A prefill worker's port is taken for as long as its process lives, and one message that is no ask does not end it.

The release stops listening at the first message that has not two parts, and at any other error, while writes may be
under way, or begun later. `mooncake-failed-loads` up to 0.1.9, on decode, takes a process for gone whose port refuses
connections.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

PARTS = 2
"""Of an ask: who asks, and what."""
FREE_SECONDS = 2.0
"""How long ZMQ, in a thread of its own, may take to close a port."""

_kept: list[socket.socket] = []
"""Ports that nobody serves, to the end of the process."""


class _Context:
    """In the place of the worker's ZMQ context until the listener has made its socket."""

    def __init__(self, livepatch: PatchContext, worker: Any) -> None:
        self._livepatch = livepatch
        self._worker = worker
        self._own = worker.async_zmq_ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def socket(self, kind: Any) -> Any:
        self._worker.async_zmq_ctx = self._own
        made = self._own.socket(kind)
        receive = made.recv_multipart

        async def asks(*args: Any, **kwargs: Any) -> Any:
            while True:
                parts = await receive(*args, **kwargs)
                if len(parts) == PARTS:
                    return parts
                self._livepatch.count("no_ask")
                self._livepatch.say("no_ask", f"a message of {len(parts)} parts is no ask, and is left")

        made.recv_multipart = asks
        return made


async def listening(livepatch: PatchContext, original: Call, worker: Any, *rest: Any, **named: Any) -> None:
    own, ours = worker.async_zmq_ctx, _Context(livepatch, worker)
    worker.async_zmq_ctx = ours
    try:
        await original(*rest, **named)
    finally:
        if worker.async_zmq_ctx is ours:  # else it may be another patch's: of an engine that decodes, too
            worker.async_zmq_ctx = own
        if worker.side_channel_port:
            keep(livepatch, worker.hostname, worker.side_channel_port)


def keep(livepatch: PatchContext, host: str, port: int) -> None:
    """Take a port that ZMQ lets go."""
    until = time.monotonic() + FREE_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            _kept.append(socket.create_server((host, port), family=family, backlog=1024))
            return
        time.sleep(0.01)
    livepatch.say("not_kept", f"port {port} could not be kept: this process may be taken for gone while it lives")
