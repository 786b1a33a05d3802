"""Bring requests of one id to a release's real front end and engine core, and tell what each side makes of them.

The front end is the release's `InputProcessor` and `OutputProcessor`, the engine core its `EngineCoreProc` with the
real scheduler; only the engine core's construction (model, executor, sockets) is left out, its loop is the driver's.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import queue
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import real_scheduler as real
from result import raised
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

SWITCH = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
ID = "cmpl-7f3e-0"
TOKENS = 6
STEPS = 30


class Answer:
    """What one request has got so far."""

    def __init__(self, request_id: str, tokens: int, samples: int = 1) -> None:
        self.queue = RequestOutputCollector(RequestOutputKind.DELTA, request_id)
        self.wanted = tokens * samples
        self.got = 0
        self.ended: list[str] = []
        self.refusal = ""

    def read(self) -> None:
        """Take what has arrived."""
        try:
            while (output := self.queue.get_nowait()) is not None:
                for sample in output.outputs:
                    self.got += len(sample.token_ids)
                    if sample.finish_reason:
                        self.ended.append(sample.finish_reason)
        except Exception as error:
            self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Take note of an error that a client is told of; any other is the engine's."""
        if type(error).__name__ not in ("ValueError", "VLLMValidationError"):
            raise error
        self.refusal = f"refused: {type(error).__name__}"

    def __str__(self) -> str:
        if self.refusal:
            return self.refusal
        if "error" in self.ended:
            return "fails"
        if not self.ended:
            return "never answered"
        return "answered" if self.got == self.wanted else f"{self.got} of {self.wanted} tokens"


class Engine:
    """An engine core with as many front ends (API servers) as asked for."""

    def __init__(self, model_config: Any, servers: int = 1) -> None:
        self.scheduler = real.make_scheduler("Scheduler", model_config, ("connector_double", "ConnectorDouble"))
        self.core = object.__new__(EngineCoreProc)
        self.core.scheduler = self.scheduler
        self.core.structured_output_manager = self.scheduler.structured_output_manager
        self.core.request_block_hasher = get_request_block_hasher(real.BLOCK_SIZE, sha256)
        self.core.mm_receiver_cache = None
        self.core.output_queue = queue.Queue()
        self.core.engine_index = 0
        self.servers = [OutputProcessor(tokenizer=None, log_stats=False) for _ in range(servers)]
        self.answers: list[Answer] = []

    def ask(self, request_id: str, *, server: int = 0, samples: int = 1, delay_free: bool = False) -> Answer:
        """Bring in a request as the release's own `add_request` does, its id kept; return its answer to be."""
        request = make_request(request_id, server, samples, delay_free)
        assign(request)
        answer = Answer(request.request_id, TOKENS, samples)
        self.answers.append(answer)
        parent = ParentRequest(request) if samples > 1 else None
        children = [request]
        if parent is not None:
            named = [parent.get_child_info(index) for index in range(samples)]
            children = [make_request(name, server, 1, delay_free, params) for name, params in named]
        try:
            for index, child in enumerate(children):
                child.external_req_id = request_id
                self.servers[server].add_request(child, None, parent, index, answer.queue)
        except Exception as error:
            answer.refuse(error)
            if parent is not None:  # as from 0.31 on
                self.abort(self.servers[server].abort_requests([parent.request_id], internal=True))
        else:
            for child in children:
                self.core.add_request(*self.core.preprocess_add_request(child))
        return answer

    def chunk(self, request_id: str, answer: Answer, *, last: bool = False) -> None:
        """Bring in a further part of a streaming-input session, or its end."""
        request = make_request(request_id)
        request.external_req_id = request_id
        request.resumable = not last
        self.servers[0].add_request(request, None, None, 0, answer.queue)
        self.core.add_request(*self.core.preprocess_add_request(request))

    def abort(self, request_ids: list[str]) -> None:
        """End requests in the engine core, as a front end asks it to."""
        self.scheduler.finish_requests(request_ids, real.RequestStatus.FINISHED_ABORTED)

    def step(self, sent: tuple[str, ...] = ()) -> None:
        """Run one step, and hand its output to the front ends."""
        scheduled = self.scheduler.schedule()
        output = real.run_model(scheduled)
        if sent:
            output.kv_connector_output = real.transfers((), sent)
        for server, outputs in (self.scheduler.update_from_output(scheduled, output) or {}).items():
            self.core.output_queue.put((server, outputs))
        while not self.core.output_queue.empty():
            server, outputs = self.core.output_queue.get()
            self.abort(self.servers[server].process_outputs(outputs.outputs).reqs_to_abort)
        for answer in self.answers:
            answer.read()

    def finish(self) -> dict[str, str]:
        """Run until there is nothing left to do; return what became of each request."""
        for _ in range(STEPS):
            self.step()
        return {name: str(answer) for name, answer in zip(("first", "second", "third"), self.answers, strict=False)}


def make_request(
    request_id: str, server: int = 0, samples: int = 1, delay_free: bool = False, params: Any = None
) -> Any:
    """Return a request as the release's front end makes them; what it does not name is None."""
    names = EngineCoreRequest.__struct_fields__
    values: dict[str, Any] = dict.fromkeys(names[: len(names) - len(EngineCoreRequest.__struct_defaults__)])
    transfer = {"kv_transfer_params": {"load": False, "delay_free": delay_free}}
    values.update(
        request_id=request_id,
        prompt_token_ids=list(range(1, real.PROMPT_TOKENS)),
        sampling_params=params
        or SamplingParams(
            n=samples,
            max_tokens=TOKENS,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=transfer,
        ),
        arrival_time=0.0,
        client_index=server,
    )
    return EngineCoreRequest(**values)


def assign(request: Any) -> None:
    """Let the release name a request, then keep its id: what the patch does, and on stock what is without its check."""
    InputProcessor.assign_request_id(request)
    request.request_id = request.external_req_id


def second_live(model_config: Any) -> dict[str, str]:
    """A client repeats the id of a request that runs."""
    engine = Engine(model_config)
    engine.ask(ID)
    engine.step()
    engine.ask(ID)
    return engine.finish()


def second_of_other_server(model_config: Any) -> dict[str, str]:
    """The repeated id reaches another API server of the same engine."""
    engine = Engine(model_config, servers=2)
    engine.ask(ID)
    engine.step()
    engine.ask(ID, server=1)
    return engine.finish()


def second_while_held(model_config: Any) -> dict[str, str]:
    """A request has ended, its blocks wait to be sent, and the router tries again; and once more when they were."""
    engine = Engine(model_config)
    engine.ask(ID, delay_free=True)
    for _ in range(TOKENS + 2):
        engine.step()
    engine.ask(ID)
    engine.step()
    engine.step(sent=(ID,))
    engine.ask(ID)
    return engine.finish()


def second_of_samples(model_config: Any) -> dict[str, str]:
    """A request for several samples is repeated."""
    engine = Engine(model_config)
    engine.ask(ID, samples=2)
    engine.step()
    engine.ask(ID, samples=2)
    return engine.finish()


def second_of_session(model_config: Any) -> dict[str, str]:
    """An ordinary request comes with the id of a streaming-input session that waits for more."""
    if "resumable" not in EngineCoreRequest.__struct_fields__:
        return {"first": "no such thing"}
    engine = Engine(model_config)
    session = Answer(ID, TOKENS)
    engine.answers.append(session)
    engine.chunk(ID, session)
    for _ in range(TOKENS + 2):
        engine.step()
    engine.ask(ID)
    engine.step()
    engine.chunk(ID, session, last=True)
    return engine.finish()


def session(model_config: Any) -> dict[str, str]:
    """A streaming-input session: two chunks, the second while the first runs, and the end."""
    if "resumable" not in EngineCoreRequest.__struct_fields__:
        return {"first": "no such thing"}
    engine = Engine(model_config)
    answer = Answer(ID, 2 * TOKENS)
    engine.answers.append(answer)
    engine.chunk(ID, answer)
    engine.step()
    engine.chunk(ID, answer)
    for _ in range(2 * TOKENS):
        engine.step()
    engine.chunk(ID, answer, last=True)
    return engine.finish()


def one_after_another(model_config: Any) -> dict[str, str]:
    """An id is used again when nothing of its first request is left."""
    engine = Engine(model_config)
    engine.ask(ID, samples=2)
    for _ in range(TOKENS + 2):
        engine.step()
    engine.ask(ID)
    for _ in range(TOKENS + 2):
        engine.step()
    engine.ask(ID, samples=2)
    return engine.finish()


CASES: list[Callable[[Any], dict[str, str]]] = [
    second_live,
    second_of_other_server,
    second_while_held,
    second_of_samples,
    second_of_session,
    session,
    one_after_another,
]


def named() -> str:
    """Return what prefill and decode, two engines, make of one id."""
    requests = [make_request(ID), make_request(ID)]
    for request in requests:
        InputProcessor.assign_request_id(request)
        assert request.external_req_id == ID
    prefill, decode = (request.request_id for request in requests)
    if prefill == decode == ID:
        return "kept"
    return (
        "each its own" if prefill != decode and prefill.startswith(ID) and decode.startswith(ID) else "something else"
    )


def play(model_config: Any) -> dict[str, Any]:
    """Play all cases; an exception where the engine core takes a request in is what would end it."""
    result: dict[str, Any] = {"named": named()}
    with mock.patch.dict(os.environ, {SWITCH: "1"}):
        result["named_with_switch"] = named()
    for case in CASES:
        try:
            result[case.__name__] = case(model_config)
        except Exception as error:
            traceback.print_exc()
            result[case.__name__] = {"engine": raised(error)}
    return result
