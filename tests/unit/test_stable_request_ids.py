"""The request id patch where the release tests do not come: an engine core in its caller's own process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.stable_request_ids import endings, fence, wrappers
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext


class Core:
    """An engine core without a client to tell; `LLMEngine` without multiprocessing has one."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(requests={}, finished_req_ids=set())

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        """Take a request in."""
        self.scheduler.requests[request.request_id] = request


class Front:
    """An output processor as `LLMEngine` uses it: without queues."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.parent_requests: dict[str, Any] = {}

    def add_request(
        self, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> None:
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


# The API server's and the engine core's part in ids that are used again; the release tests have them together.


def step(*scheduled: str, finished: tuple[str, ...] = ()) -> Any:
    """A scheduler output, as far as the fence reads it."""
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(scheduled, 1), finished_req_ids=set(finished))


def test_an_id_is_under_way_until_the_step_that_told_of_its_end_is_over() -> None:
    scheduler = SimpleNamespace(finished_req_ids=set(), requests={})
    known = fence.of(scheduler)
    assert fence.of(scheduler) is known
    first, second = step("a"), step("b", finished=("a",))
    known.begun(first)
    assert known.under_way("a")
    scheduler.finished_req_ids = {"a"}
    known.ended(first, {})
    assert known.under_way("a"), "the workers have not heard"
    scheduler.finished_req_ids = set()
    known.begun(second)
    assert known.under_way("a"), "they hear with this step"
    known.ended(second, {})
    assert not known.under_way("a")


def test_steps_that_never_end_are_forgotten() -> None:
    known = fence.Fence(SimpleNamespace(finished_req_ids=set()))
    steps = [step(str(number)) for number in range(fence.STEPS + 1)]
    for one in steps:
        known.begun(one)
    assert not known.under_way("0")
    assert known.under_way("1")


def test_who_waits_is_let_in_once_and_not_after_an_abort(context: PatchContext) -> None:
    core = Core()
    known = fence.of(core.scheduler)
    amid = step("a", "b", "c")
    known.begun(amid)
    for name in "abc":
        core.add_request(request(name))
    assert core.scheduler.requests == {}
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        core.add_request(request("a"))
    known.abort_parked(["a", "unknown"], "aborted")
    outputs: dict[int, Any] = {}
    known.answers.clear()
    known.ended(amid, outputs)
    assert list(core.scheduler.requests) == ["b", "c"]
    known.ended(amid, outputs)
    assert context.counters == {"waited": 3, "refused_live": 1}
    assert outputs == {}


def test_of_those_that_wait_none_is_left_when_all_are_aborted() -> None:
    known = fence.Fence(SimpleNamespace(finished_req_ids=set(), requests={}))
    waiting = request("a")
    known.parked["a"] = waiting, lambda: None
    known.abort_parked(None, "aborted")
    assert (known.parked, waiting.status, known.answers) == ({}, "aborted", [(0, "a")])


def test_only_what_lives_is_answered() -> None:
    requests = {
        "a": request("a"),
        "held": request("held", finished=True),
        "left": request("left", abort_immediately=True),
    }
    known = fence.Fence(SimpleNamespace(requests=requests))
    assert known.alive(["a", "held", "left", "unknown"]) == [(0, "a")]


def test_a_request_waits_for_the_end_of_the_former_one_alone() -> None:
    async def play() -> list[str]:
        known, order = endings.Endings(), []
        known.forgotten(["a", "b"])

        async def send(name: str) -> None:
            assert await known.over(name, lambda: False)
            order.append(name)

        tasks = [asyncio.ensure_future(send(name)) for name in ("a", "b", "c")]
        await asyncio.sleep(0)
        known.seen([SimpleNamespace(request_id="a", finish_reason=None)])
        for name in ("b", "a"):
            order.append("end")
            known.seen([SimpleNamespace(request_id=name, finish_reason="abort")])
            while name not in order:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert not known.awaited
        return order

    assert asyncio.run(play()) == ["c", "end", "b", "end", "a"]


def test_a_wait_ends_with_the_engine_or_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    known = endings.Endings()
    known.forgotten(["a"])
    looks = iter([False, True])
    monkeypatch.setattr(endings, "LOOK_SECONDS", 0.0)
    assert asyncio.run(known.over("a", lambda: next(looks))), "the release says that its engine is dead"
    monkeypatch.setattr(endings, "WAIT_SECONDS", 0.0)
    assert not asyncio.run(known.over("a", lambda: False))
    assert list(known.awaited) == ["a"], "its outputs may still come"


def test_what_is_awaited_is_bounded_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "REMEMBERED", 2)
    known = endings.Endings()
    known.forgotten("abc")
    assert list(known.awaited) == ["b", "c"]


class Llm:
    """As much of AsyncLLM as the patch wraps or asks."""

    errored = False

    def __init__(self) -> None:
        self.output_processor = Front()
        self.sent: list[Any] = []

    async def _add_request(self, request: Any) -> None:
        self.sent.append(request)


def test_who_has_waited_too_long_is_refused(context: PatchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "WAIT_SECONDS", 0.0)
    wrapped = guard.in_place_of(
        vars(Llm)["_add_request"], wrappers.wrappers(context)[wrappers.SEND], context, wrappers.SEND
    )
    monkeypatch.setattr(Llm, "_add_request", wrapped)
    llm = Llm()
    asyncio.run(llm._add_request(request("a")))
    getattr(llm.output_processor, endings.ATTRIBUTE).forgotten(["a"])
    with pytest.raises(ValueError, match="the end of its former request was not heard of"):
        asyncio.run(llm._add_request(request("a")))
    assert [one.request_id for one in llm.sent] == ["a"]
    llm.errored = True  # the release's own code says what is wrong
    asyncio.run(llm._add_request(request=request("a")))
    assert len(llm.sent) == 2
