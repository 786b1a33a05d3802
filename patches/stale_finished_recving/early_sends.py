"""A MultiConnector passes a send on when the last of the children that announced it has reported its end.

Its worker learns how many announced one with the metadata of the step that tells of the request's end. A child may say
so earlier, while a step is running that was scheduled before the request ended: NIXL's reader is asked to read when the
request ends, and may be fast. Stock passes that on at once, and the blocks are freed while the other children still
read them. So what a child says is kept back until the request's end has reached the worker.

Source: docs/connector-completions.md, "MultiConnector".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import Remembered

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector"

REMEMBERED = 65536
"""How many ids of ended requests are remembered for each child, of which it has not reported that they were sent."""

PATIENCE = 64
"""How many calls the send of a request is kept back whose end does not reach the worker.

As many as steps may be under way at once, and more: one a pipeline stage. Who has not been named by then was named
before, and is remembered no more, or has reported twice.
"""

_SEEN = "_livepatch_early_sends"
"""Attribute of a MultiConnector whose children were seen to."""


class ChildSends:
    """The wrapper of the method by which one child reports: (sent, received), or from 0.30 an object with both."""

    __slots__ = ("__weakref__", "calls", "ended", "held", "livepatch")  # weak: it goes with its child

    def __init__(self, livepatch: PatchContext) -> None:
        self.livepatch = livepatch
        self.calls = 0
        # Requests whose end reached the worker, oldest first, until the child's send.
        self.ended: Remembered[str, None] = Remembered(REMEMBERED)
        self.held: dict[str, int] = {}  # request id: the call in which the child reported its send, too early

    def __call__(self, original: Call, child: Any, finished_req_ids: Any, *rest: Any, **named: Any) -> Any:
        self.calls += 1
        for request_id in finished_req_ids:
            self.ended.remember(request_id, None)
        result = original(finished_req_ids, *rest, **named)
        sent: set[str] = set((result[0] if isinstance(result, tuple) else result.finished_sending) or ())
        early = {name for name in sent if name not in self.ended and not self.livepatch.aside}
        due = {name for name, call in self.held.items() if name in self.ended or self.calls - call >= PATIENCE}
        new = early.difference(self.held)
        for request_id in early:
            self.held.setdefault(request_id, self.calls)
        for request_id in due:
            del self.held[request_id]
        given = sent - early | due
        for request_id in given:  # its next life, if there is one, has not ended
            self.ended.pop(request_id, None)
        try:
            self.report(new)
        except Exception as error:
            self.livepatch.stand_aside("reporting sends that came early", error)
        if given == sent:
            return result
        if isinstance(result, tuple):
            return given or None, *result[1:]
        return dataclasses.replace(result, finished_sending=given)

    def report(self, early: set[str]) -> None:
        for request_id in early:
            message = f"request {request_id}: one of several connectors has sent it before its end was told; that waits"
            self.livepatch.tell("send_early", message)


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    """The wrappers of the methods by which a worker asks its MultiConnector: to 0.29 the one, from 0.30 the other."""

    def see_to(multi: Any, method: str) -> None:
        if _SEEN not in vars(multi):
            setattr(multi, _SEEN, True)
            for child in multi._connectors:
                # Should the patch stand aside, what is kept back is still to be given out.
                sends = livepatch.lasting(ChildSends(livepatch))
                livepatch.around_its(child, method, sends)

    def get_finished(original: Call, multi: Any, *rest: Any, **named: Any) -> Any:
        if not hasattr(multi, "get_transfer_results"):  # which it asks, where there is one
            see_to(multi, "get_finished")
        return original(*rest, **named)

    def get_transfer_results(original: Call, multi: Any, *rest: Any, **named: Any) -> Any:
        see_to(multi, "get_transfer_results")
        return original(*rest, **named)

    return {f"{MULTI}.get_finished": get_finished, f"{MULTI}.get_transfer_results": get_transfer_results}
