"""Use a request's id again while something of its first request is still under way, in a release's real engine.

The front ends are the release's `AsyncLLM` (its `_add_request` and `abort`) and `OutputProcessor`, the engine core its
`EngineCoreProc` with the real `AsyncScheduler`. Sockets, threads and the model are the driver's, so that it decides
what has arrived where: steps under way, outputs that travel, aborts that wait in both of the engine core's queues.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
import queue
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import real_scheduler as real
import request_ids
from request_ids import ID, TOKENS
from result import raised
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

ROUNDS = 30


class Client:
    """What connects one API server with the engine core: what is sent is taken when the engine core looks."""

    def __init__(self, engine: Engine, index: int) -> None:
        self.engine, self.index = engine, index
        self.resources = SimpleNamespace(engine_dead=False)

    async def add_request_async(self, request: Any) -> None:
        request.client_index = self.index
        self.engine.inputs.append(("add", request))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids:
            self.engine.core.aborts_queue.put_nowait(request_ids)
            self.engine.inputs.append(("abort", request_ids))


class Server:
    """One API server."""

    def __init__(self, engine: Engine, index: int) -> None:
        self.processor = OutputProcessor(tokenizer=None, log_stats=False)
        self.client = Client(engine, index)
        self.wire: deque[Any] = deque()  # outputs that have not arrived
        llm = self.llm = object.__new__(AsyncLLM)
        llm.output_processor, llm.engine_core = self.processor, self.client
        llm.output_handler, llm.log_requests = None, False
        if hasattr(AsyncLLM, "check_admission"):
            llm.check_admission = lambda **_: None


class Answer:
    """What one request has got so far; `token` is what the model makes for it, and for no other."""

    def __init__(self, token: int) -> None:
        self.queue = RequestOutputCollector(RequestOutputKind.DELTA, ID)
        self.token, self.got, self.ended = token, [], ""  # type: ignore[var-annotated]

    def read(self) -> None:
        try:
            while (output := self.queue.get_nowait()) is not None:
                for sample in output.outputs:
                    self.got += sample.token_ids
                    self.ended = sample.finish_reason or self.ended
        except Exception as error:
            self.ended = f"refused: {type(error).__name__}"

    def __str__(self) -> str:
        if set(self.got) - {self.token}:
            return "tokens of another request"
        if self.ended == "length" and len(self.got) == TOKENS:
            return "answered"
        return self.ended or "never answered"


class Engine:
    """An engine core whose steps overlap, and its API servers."""

    def __init__(self, model_config: Any, servers: int = 1) -> None:
        self.scheduler = real.make_scheduler("AsyncScheduler", model_config, ("connector_double", "ConnectorDouble"))
        self.core = object.__new__(EngineCoreProc)
        self.core.scheduler = self.scheduler
        self.core.structured_output_manager = self.scheduler.structured_output_manager
        self.core.request_block_hasher = get_request_block_hasher(real.BLOCK_SIZE, sha256)
        self.core.mm_receiver_cache = None
        self.core.aborts_queue, self.core.output_queue = queue.Queue(), queue.Queue()
        self.core.engine_index = 0
        self.inputs: deque[tuple[str, Any]] = deque()  # the engine core's input queue
        self.steps: deque[tuple[Any, list[int]]] = deque()  # under way, and the token that each makes for each request
        self.servers = [Server(self, index) for index in range(servers)]
        self.answers: list[Answer] = []
        self.tokens: dict[str, int] = {}  # by arrival time, which tells requests of one id apart
        self.asking: list[asyncio.Task[Any]] = []

    async def ask(self, server: int = 0, name: str = ID) -> None:
        """A client's request, as far as it comes."""
        answer = Answer(11 + len(self.answers))
        self.answers.append(answer)
        request = request_ids.make_request(name, server)
        request.arrival_time = float(answer.token)
        request_ids.assign(request)
        adding = self.servers[server].llm._add_request(request, None, None, 0, answer.queue)
        self.asking.append(asyncio.ensure_future(adding))
        await self.breathe()

    async def hang_up(self, server: int = 0) -> None:
        """The client of the id has gone."""
        await self.servers[server].llm.abort(ID, internal=True)

    async def breathe(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def take_input(self) -> None:
        """The engine core looks at its input queue."""
        while self.inputs:
            kind, what = self.inputs.popleft()
            if kind == "abort":
                self.core.abort_requests(what)
            else:
                self.core.add_request(*self.core.preprocess_add_request(what))

    def begin(self) -> None:
        """A step begins."""
        scheduled = self.scheduler.schedule()
        requests = self.scheduler.requests
        self.steps.append((scheduled, [int(requests[name].arrival_time) for name in scheduled.num_scheduled_tokens]))

    def end(self) -> None:
        """The oldest step under way ends; its outputs travel."""
        scheduled, tokens = self.steps.popleft()
        output = real.run_model(scheduled)
        output.sampled_token_ids = [[token] for token in tokens]
        self.core._process_aborts_queue()
        for server, outputs in (self.scheduler.update_from_output(scheduled, output) or {}).items():
            self.core.output_queue.put((server, outputs))
        while not self.core.output_queue.empty():
            server, outputs = self.core.output_queue.get()
            self.servers[server].wire.append(outputs)

    async def deliver(self) -> None:
        """What travels arrives."""
        for server in self.servers:
            while server.wire:
                processed = server.processor.process_outputs(server.wire.popleft().outputs)
                await self.breathe()  # where the release lets others run, before it sends the aborts
                await server.client.abort_requests_async(processed.reqs_to_abort)
        for answer in self.answers:
            answer.read()

    async def step(self) -> None:
        """One round of the engine core's loop, two steps under way, and of the servers' loops."""
        self.take_input()
        while len(self.steps) < 2 and self.scheduler.has_requests():
            self.begin()
        if self.steps:
            self.end()
        await self.deliver()
        await self.breathe()

    async def finish(self) -> dict[str, str]:
        """Run until there is nothing left to do; return what became of each request."""
        for _ in range(ROUNDS):
            await self.step()
        for answer, task in zip(self.answers, self.asking, strict=True):
            if task.done() and task.exception() is not None:
                answer.ended = f"refused: {type(task.exception()).__name__}"
            task.cancel()
        return {name: str(answer) for name, answer in zip(("first", "second", "third"), self.answers, strict=False)}


async def again_amid_steps(engine: Engine, server: int = 0) -> None:
    """A client hangs up and tries again amid the first of two steps; the engine core looks when this one has ended."""
    await engine.ask()
    engine.take_input()
    engine.begin()
    engine.begin()
    await engine.hang_up()
    await engine.ask(server)
    engine.end()
    engine.take_input()


async def again_amid_steps_at_another_server(engine: Engine) -> None:
    """The same, and the second request comes to another API server, which knows nothing of the first."""
    await again_amid_steps(engine, server=1)


async def again_after_the_last_step_began(engine: Engine) -> None:
    """The same, and the step under way ends before another one begins."""
    await again_amid_steps(engine)
    engine.end()


async def gone_while_waiting(engine: Engine) -> None:
    """The same, and the second hangs up before the steps have ended; then a third comes."""
    await again_amid_steps_at_another_server(engine)
    await engine.hang_up(server=1)
    engine.take_input()
    await engine.ask(server=1)
    engine.take_input()


async def again_amid_outputs(engine: Engine) -> None:
    """A client hangs up and tries again, and outputs for its first request have not arrived at the API server."""
    await engine.ask()
    engine.take_input()
    engine.begin()
    engine.begin()
    engine.end()
    engine.end()
    await engine.hang_up()
    await engine.ask()
    await engine.deliver()


async def again_before_the_second_look_at_the_abort(engine: Engine) -> None:
    """The engine core has each abort in two queues; it takes one with the second request, the other amid its step."""
    await engine.ask(name="other")
    await engine.ask()
    for _ in range(2):
        await engine.step()
    while engine.steps:
        engine.end()
    await engine.deliver()
    await engine.hang_up()
    await engine.ask(server=1)
    engine.take_input()
    engine.begin()
    engine.end()


async def again_before_the_abort_is_sent(engine: Engine) -> None:
    """The API server ends a request at a stop string; its client sends the next one before the engine core hears."""
    await engine.ask()
    await engine.step()
    state = engine.servers[0].processor.request_states[ID]
    state.detokenizer.update = lambda *_: "stop string"
    while engine.steps:
        engine.end()
    (delivering := asyncio.ensure_future(engine.deliver())).add_done_callback(lambda _: None)
    while not engine.answers[0].queue.output:
        await asyncio.sleep(0)
    await engine.ask()
    await delivering


CASES: dict[Callable[[Engine], Coroutine[Any, Any, None]], int] = {
    again_amid_steps: 1,
    again_amid_steps_at_another_server: 2,
    again_after_the_last_step_began: 1,
    gone_while_waiting: 2,
    again_amid_outputs: 1,
    again_before_the_second_look_at_the_abort: 2,
    again_before_the_abort_is_sent: 1,
}
"""What is played, and with how many API servers."""


async def _played(case: Callable[[Engine], Coroutine[Any, Any, None]], engine: Engine) -> dict[str, str]:
    await case(engine)
    return await engine.finish()


def play(model_config: Any) -> dict[str, Any]:
    """Play all cases; an exception where the engine core takes a request in, or a step's output, would end it."""
    result: dict[str, Any] = {}
    for case, servers in CASES.items():
        try:
            result[case.__name__] = asyncio.run(_played(case, Engine(model_config, servers)))
        except Exception as error:
            traceback.print_exc()
            result[case.__name__] = {"engine": raised(error)}
    return result
