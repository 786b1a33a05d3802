"""The request id patch where the release tests do not come: an engine core in its caller's own process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.stable_request_ids import wrappers
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext


class Core:
    """An engine core without a client to tell; `LLMEngine` without multiprocessing has one."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(requests={})

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        """Take a request in."""
        self.scheduler.requests[request.request_id] = request


class Front:
    """An output processor as `LLMEngine` uses it: without queues."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.parent_requests: dict[str, Any] = {}

    def add_request(self, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0) -> None:
        """Take a request in."""
        self.request_states[request.request_id] = request
        if parent_req is not None:
            self.parent_requests[parent_req.request_id] = parent_req


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> PatchContext:
    """Both classes patched."""
    context = PatchContext("stable-request-ids", {}, {}, lambda: None)
    made = wrappers.wrappers(context)
    for owner, target in ((Core, wrappers.ADMIT), (Front, wrappers.REGISTER)):
        stand_in = guard.in_place_of(vars(owner)["add_request"], made[target], context, target)
        monkeypatch.setattr(owner, "add_request", stand_in)
    return context


def request(name: str = "a", finished: bool = False, **more: Any) -> Any:
    """A request as either side keeps it."""
    return SimpleNamespace(request_id=name, client_index=0, is_finished=lambda: finished, **more)


@pytest.mark.parametrize(("finished", "kind"), [(False, "refused_live"), (True, "refused_held")])
def test_core_in_own_process_raises(context: PatchContext, finished: bool, kind: str) -> None:
    """The error reaches the caller, and the request that is there stays."""
    core, first = Core(), request(finished=finished)
    core.add_request(first)
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        core.add_request(request=request())
    assert core.scheduler.requests == {"a": first}
    assert context.counters == {kind: 1}


def test_core_keeps_sessions(context: PatchContext) -> None:
    """A session's further chunk comes from the same client; another client's request is none."""
    core = Core()
    core.add_request(request(streaming_queue=[]))
    core.add_request(request(streaming_queue=[]), 0)
    other = request()
    other.client_index = 1
    with pytest.raises(ValueError, match="in use"):
        core.add_request(other)


def test_front_without_queues(context: PatchContext) -> None:
    """A second request is refused; a session's chunk and its end are not."""
    front = Front()
    front.add_request(request("a"), None)
    with pytest.raises(ValueError, match="in use"):
        front.add_request(request("a"), None)
    front.add_request(request("b", streaming_input=True), None)
    front.add_request(request("b", resumable=True, streaming_input=True), None)
    front.add_request(request("b"), None)
    assert context.counters == {"refused_live": 1}


def test_samples(context: PatchContext) -> None:
    """An id is live while one sample of it is, and whether its requests ask for one sample or several."""
    front, parent = Front(), SimpleNamespace(request_id="a")
    front.add_request(request("0_a"), None, parent, 0)
    front.add_request(request("1_a"), None, parent, 1)
    del front.request_states["0_a"]  # has ended
    again = SimpleNamespace(request_id="a")
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        front.add_request(request("0_a"), None, again, 0)
    assert again.request_id not in front.parent_requests, "an abort by that name would be the first one's"
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        front.add_request(request("a"), None)
    front.add_request(request("b"), None)
    with pytest.raises(ValueError, match="request id 'b' is in use"):
        front.add_request(request("0_b"), None, parent_req=SimpleNamespace(request_id="b"), request_index=0)
    assert (list(front.request_states), front.parent_requests) == (["1_a", "b"], {"a": parent})


def test_ids_that_were_kept_are_refused_still_when_the_patch_stands_aside(context: PatchContext) -> None:
    """Here or in another process: the scheduler would assert, and so end the engine."""
    core = Core()
    core.add_request(request())
    context.withdraw()
    with pytest.raises(ValueError, match="is in use"):
        core.add_request(request())
    front = Front()
    front.add_request(request(), None)
    with pytest.raises(ValueError, match="is in use"):
        front.add_request(request(), None)


def test_an_error_of_its_own_refuses_nobody(context: PatchContext) -> None:
    core = Core()
    core.scheduler.requests["a"] = SimpleNamespace()  # not as a request is: the patch asks what it has not
    core.add_request(request())
    assert context.aside
    assert core.scheduler.requests["a"].client_index == 0
