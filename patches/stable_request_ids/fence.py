"""An engine core lets an id be used again when nothing of its former request is under way there.

A step that was begun for a request whose client hung up still ends. Its output names the request by id, and so do the
workers' states, until the step that tells them of the request's end has been processed.

And each request that was aborted is answered, as the release answers those that end by themselves: an API server that
sees this answer knows that no output of the request follows.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from ...sitecustomize.kit import attached

ATTRIBUTE = "_livepatch_ids"
"""Attribute of a scheduler: its `Fence`."""

STEPS = 256
"""How many steps under way are remembered: more than any engine has. Those before were given up with their engine."""


class Fence:
    """What one scheduler has under way, by request id."""

    __slots__ = ("answers", "parked", "scheduler", "steps")

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.steps: OrderedDict[int, Any] = OrderedDict()  # scheduler outputs whose step has not ended, oldest first
        self.parked: dict[str, tuple[Any, Callable[[], Any]]] = {}  # requests that wait, and what lets them in
        self.answers: list[tuple[int, str]] = []  # client index, id: aborted requests that are not answered yet

    def under_way(self, request_id: str) -> bool:
        """Whether a step that knows a former request of this id has not ended, or is still to tell of its end."""
        if request_id in getattr(self.scheduler, "finished_req_ids", ()):
            return True
        return any(
            request_id in step.num_scheduled_tokens or request_id in step.finished_req_ids
            for step in self.steps.values()
        )

    def begun(self, step: Any) -> None:
        self.steps[id(step)] = step
        if len(self.steps) > STEPS:
            self.steps.popitem(last=False)

    def ended(self, step: Any, outputs: dict[int, Any]) -> None:
        """Answer what was aborted, in the step's outputs by client index, and let in who need not wait any more."""
        self.steps.pop(id(step), None)
        if self.answers:
            answers, self.answers = self.answers, []
            made = sys.modules["vllm.v1.engine"]
            for client, request_id in answers:
                if client not in outputs:
                    outputs[client] = made.EngineCoreOutputs()
                answer = made.EngineCoreOutput(request_id, [], finish_reason=made.FinishReason.ABORT)
                outputs[client].outputs.append(answer)
        for request_id in [name for name in self.parked if not self.under_way(name)] if self.parked else ():
            _, let_in = self.parked.pop(request_id)
            let_in()

    def abort_parked(self, request_ids: Iterable[str] | None, status: Any) -> None:
        """End requests that wait: those named, None for all."""
        for request_id in list(self.parked if request_ids is None else request_ids):
            if request_id in self.parked:
                request, _ = self.parked.pop(request_id)
                request.status = status
                self.answers.append((request.client_index, request_id))

    def alive(self, request_ids: Iterable[str]) -> list[tuple[int, str]]:
        """Those of the requests that have not ended, as `answers` has them."""
        requests = getattr(self.scheduler, "requests", {})
        found = [requests.get(request_id) for request_id in request_ids]
        return [
            (request.client_index, request.request_id)
            for request in found
            # One that the engine core itself ends on arrival was answered before.
            if request is not None and not request.is_finished() and not getattr(request, "abort_immediately", False)
        ]


def of(scheduler: Any) -> Fence:
    """The scheduler's fence, made when it is first asked for."""
    return attached(scheduler, ATTRIBUTE, lambda: Fence(scheduler))
