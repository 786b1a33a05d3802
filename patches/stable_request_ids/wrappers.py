"""Requests keep the id that they came with, and an id is live once: `fence` and `endings` say when it has ended.

Source: vllm#27987, vllm PR#34415.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import attached
from . import endings, fence

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

ASSIGN = "vllm.v1.engine.input_processor:InputProcessor.assign_request_id"
REGISTER = "vllm.v1.engine.output_processor:OutputProcessor.add_request"
ADMIT = "vllm.v1.engine.core:EngineCore.add_request"
SEND = "vllm.v1.engine.async_llm:AsyncLLM._add_request"
FORGET = "vllm.v1.engine.output_processor:OutputProcessor.abort_requests"
RECEIVE = "vllm.v1.engine.output_processor:OutputProcessor.process_outputs"
ABORT = "vllm.v1.engine.core:EngineCore.abort_requests"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target."""

    def assign(original: Callable[..., Any], request: Any, *rest: Any, **named: Any) -> Any:
        """What the release's own switch does, where it has one: the internal id is the external one."""
        result = original(request, *rest, **named)
        request.request_id = request.external_req_id
        return result

    def register(
        original: Callable[..., Any],
        processor: Any,
        request: Any,
        prompt: Any,
        parent_req: Any = None,
        request_index: int = 0,
        queue: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """The front end takes a request in: not a second one of an id that it serves already."""
        name = request.request_id if parent_req is None else parent_req.request_id
        if _is_live(processor, request, parent_req, queue):
            if parent_req is not None:
                # From 0.31 the caller answers our error by an abort of this name, which is the live one's.
                parent_req.request_id = f"{name} (refused)"
            raise refused("refused_live", name, "another request of that id is running")
        return original(request, prompt, parent_req, request_index, queue, *rest, **named)

    def admit(original: Callable[..., Any], core: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """The engine core takes a request in: not a second one of an id that it holds.

        It holds more than this front end knows of: requests of other API servers, and finished ones whose blocks are
        still to be sent. The scheduler would assert, and so end the engine core.
        """
        aborts = getattr(core, "aborts_queue", None)
        if aborts is not None and not aborts.empty():
            # An abort waits in two queues. The other one is read amid a step, and would end this request.
            core._process_aborts_queue()
        held = getattr(core.scheduler, "requests", {}).get(request.request_id)
        known = fence.of(core.scheduler)
        if held is None and request.request_id not in known.parked:
            if not known.under_way(request.request_id):
                return original(request, *rest, **named)
            known.parked[request.request_id] = request, lambda: core.add_request(request, *rest, **named)
            livepatch.tell("waited", f"request id {request.request_id!r} is used again while steps of it run: it waits")
            return None
        if held is not None and _is_session(held, request):
            return original(request, *rest, **named)
        held_for_transfer = held is not None and held.is_finished()
        what = "its blocks are kept for a transfer" if held_for_transfer else "another request of that id is running"
        error = refused("refused_held" if held_for_transfer else "refused_live", request.request_id, what)
        tell = getattr(core, "_handle_request_validation_error", None)
        if tell is not None:
            tell(request, error)
            return None
        tell = getattr(core, "_handle_request_preproc_error", None)
        if tell is None:
            raise error  # no client to tell: the engine core runs in the caller's own process
        try:
            raise error
        except type(error):
            tell(request)  # logs the error in hand, and sends the client word that its request failed
        return None

    def refused(kind: str, name: str, what: str) -> Exception:
        message = f"request id {name!r} is in use: {what}; ids are kept as they come, so each can be live only once"
        livepatch.tell(kind, message)
        # The class that the release's servers answer with "bad request"; whoever takes a request in has it loaded.
        kinds = sys.modules.get("vllm.exceptions")
        error: Exception = getattr(kinds, "VLLMValidationError", ValueError)(message)
        return livepatch.deliberate(error)

    # In the engine core

    def begun(original: Callable[..., Any], scheduler: Any, *rest: Any, **named: Any) -> Any:
        step = original(*rest, **named)
        fence.of(scheduler).begun(step)
        return step

    def ended(original: Callable[..., Any], scheduler: Any, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        outputs = original(scheduler_output, *rest, **named)
        fence.of(scheduler).ended(scheduler_output, outputs)
        return outputs

    def finish(
        original: Callable[..., Any], scheduler: Any, request_ids: Any, finished_status: Any, *rest: Any, **named: Any
    ) -> Any:
        """A request that waits for its id can be aborted, too."""
        known = fence.of(scheduler)
        if known.parked:
            if isinstance(request_ids, str):
                request_ids = [request_ids]
            elif request_ids is not None:
                request_ids = list(request_ids)  # it may be an iterator
            known.abort_parked(request_ids, finished_status)
        return original(request_ids, finished_status, *rest, **named)

    def abort(original: Callable[..., Any], core: Any, request_ids: Any, *rest: Any, **named: Any) -> Any:
        known = fence.of(core.scheduler)
        alive = known.alive([request_ids] if isinstance(request_ids, str) else request_ids)
        result = original(request_ids, *rest, **named)
        known.answers += alive
        return result

    # In the API server

    def send(original: Callable[..., Any], llm: Any, request: Any, *rest: Any, **named: Any) -> Any:
        known = attached(llm.output_processor, endings.ATTRIBUTE, endings.Endings)
        if request.request_id not in known.awaited:
            return original(request, *rest, **named)
        return wait(known, llm, request.request_id, lambda: original(request, *rest, **named))

    async def wait(known: endings.Endings, llm: Any, request_id: str, proceed: Callable[[], Any]) -> Any:
        livepatch.tell("waited", f"request id {request_id!r} is used again before its former request's end: it waits")
        if not await known.over(request_id, lambda: bool(llm.errored)):
            raise refused("refused_live", request_id, "the end of its former request was not heard of")
        return await proceed()

    def forget(original: Callable[..., Any], processor: Any, *rest: Any, **named: Any) -> Any:
        aborted = original(*rest, **named)
        known: endings.Endings | None = getattr(processor, endings.ATTRIBUTE, None)
        if known is not None:
            known.forgotten(aborted)
        return aborted

    def receive(
        original: Callable[..., Any], processor: Any, engine_core_outputs: Any, *rest: Any, **named: Any
    ) -> Any:
        known: endings.Endings | None = getattr(processor, endings.ATTRIBUTE, None)
        if known is None:
            return original(engine_core_outputs, *rest, **named)
        processed = original(engine_core_outputs, *rest, **named)
        known.forgotten(processed.reqs_to_abort)
        known.seen(engine_core_outputs)  # also the ends of those: they come no more
        return processed

    # Ids that were kept stay in use when the patch has stood aside, here or in another process: the rest goes on.
    kept: dict[str, Callable[..., Any]] = {
        REGISTER: register,
        ADMIT: admit,
        ABORT: abort,
        f"{SCHEDULER}.schedule": begun,
        f"{SCHEDULER}.update_from_output": ended,
        f"{SCHEDULER}.finish_requests": finish,
        SEND: send,
        FORGET: forget,
        RECEIVE: receive,
    }
    return {ASSIGN: assign, **{target: livepatch.lasting(wrapper) for target, wrapper in kept.items()}}


def _is_live(processor: Any, request: Any, parent: Any, queue: Any) -> bool:
    """Whether the front end serves the id, the request's own or that of the parent that it is a sample of, already."""
    states, parents = processor.request_states, processor.parent_requests
    state = states.get(request.request_id)
    if parent is not None:
        return state is not None or parent.request_id in states or parents.get(parent.request_id, parent) is not parent
    if request.request_id in parents:
        return True
    if state is None:
        return False
    if queue is not None:
        return state.queue is not queue  # a streaming session's chunks all come with the session's queue
    return not (getattr(request, "resumable", False) or getattr(state, "streaming_input", False))


def _is_session(held: Any, request: Any) -> bool:
    """Whether this is a further chunk, or the end, of the streaming session that the engine core holds."""
    return getattr(held, "streaming_queue", None) is not None and held.client_index == request.client_index
