"""One message that is no ask does not end a prefill worker's listener.

The release stops listening at the first message that has not two parts, while prefills wait to be asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

PARTS = 2
"""Of an ask: who asks, and what."""


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
                self._livepatch.tell("no_ask", f"a message of {len(parts)} parts is no ask, and is left")

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
