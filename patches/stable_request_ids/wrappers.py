"""Requests keep the id that they came with, and an id is live once.

Source: vllm#27987, vllm PR#34415.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

ASSIGN = "vllm.v1.engine.input_processor:InputProcessor.assign_request_id"
REGISTER = "vllm.v1.engine.output_processor:OutputProcessor.add_request"
ADMIT = "vllm.v1.engine.core:EngineCore.add_request"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target, in wrapt's form (wrapped, instance, args, kwargs)."""

    def assign(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        """What the release's own switch does, where it has one: the internal id is the external one."""
        result = wrapped(*args, **kwargs)
        request = args[0] if args else kwargs["request"]
        request.request_id = request.external_req_id
        return result

    def register(wrapped: Callable[..., Any], processor: Any, args: Any, kwargs: Any) -> Any:
        """The front end takes a request in: not a second one of an id that it serves already."""
        given = dict(zip(("request", "prompt", "parent_req", "request_index", "queue"), args, strict=False)) | kwargs
        request, parent = given["request"], given.get("parent_req")
        name = request.request_id if parent is None else parent.request_id
        if _is_live(processor, request, parent, given.get("queue")):
            if parent is not None:
                # From 0.31 the caller answers our error by an abort of this name, which is the live one's.
                parent.request_id = f"{name} (refused)"
            raise refused("refused_live", name, "another request of that id is running")
        return wrapped(*args, **kwargs)

    def admit(wrapped: Callable[..., Any], core: Any, args: Any, kwargs: Any) -> Any:
        """The engine core takes a request in: not a second one of an id that it holds.

        It holds more than this front end knows of: requests of other API servers, and finished ones whose blocks are
        still to be sent. The scheduler would assert, and so end the engine core.
        """
        request = args[0] if args else kwargs["request"]
        held = getattr(core.scheduler, "requests", {}).get(request.request_id)
        if held is None or _is_session(held, request):
            return wrapped(*args, **kwargs)
        what = "its blocks are kept for a transfer" if held.is_finished() else "another request of that id is running"
        error = refused("refused_held" if held.is_finished() else "refused_live", request.request_id, what)
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
        livepatch.count(kind)
        message = f"request id {name!r} is in use: {what}; ids are kept as they come, so each can be live only once"
        livepatch.say(kind, message)
        # The class that the release's servers answer with "bad request"; whoever takes a request in has it loaded.
        kinds = sys.modules.get("vllm.exceptions")
        error: Exception = getattr(kinds, "VLLMValidationError", ValueError)(message)
        return livepatch.deliberate(error)

    # Ids that are kept stay in use when the patch has stood aside, here or in another process: refusing goes on.
    return {ASSIGN: assign, REGISTER: livepatch.lasting(register), ADMIT: livepatch.lasting(admit)}


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
