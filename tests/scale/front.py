# mypy: disable-error-code="import-not-found"
"""A release's front end: its real `AsyncLLM` and `OutputProcessor`, with no process, socket or tokenizer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector


class FrontEnd:
    """One API server. What it sends waits in `inputs`, and aborts in the engine core's second queue, too."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.inputs: deque[tuple[str, Any]] = deque()
        self.resources = SimpleNamespace(engine_dead=False)
        self.processor = OutputProcessor(tokenizer=None, log_stats=False)
        llm = self.llm = object.__new__(AsyncLLM)
        llm.output_processor, llm.engine_core = self.processor, self
        llm.output_handler, llm.log_requests = None, False
        if hasattr(AsyncLLM, "check_admission"):
            llm.check_admission = lambda **_: None
        self.loop = asyncio.new_event_loop()
        self.asking: dict[int, asyncio.Task[Any]] = {}  # by client's number: requests that were not sent yet

    # What the release calls: its client of the engine core

    async def add_request_async(self, request: Any) -> None:
        self.inputs.append(("add", request))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids:
            self.core.aborts_queue.put_nowait(request_ids)
            self.inputs.append(("abort", request_ids))

    # What a client does

    def ask(self, client: Any) -> None:
        """Bring in a client's request: the release names it, takes it in, and sends it when it may."""
        request = _request(client)
        InputProcessor.assign_request_id(request)
        client.internal = request.request_id
        client.queue = RequestOutputCollector(RequestOutputKind.DELTA, client.internal)
        sending = self.llm._add_request(request, None, None, 0, client.queue)
        self.asking[client.number] = self.loop.create_task(sending)
        self.breathe()
        self.sent(client)

    def sent(self, client: Any) -> None:
        """See whether a client's request was sent by now, or refused."""
        task = self.asking.get(client.number)
        if task is not None and task.done():
            del self.asking[client.number]
            if task.exception() is not None:
                client.end = f"refused: {type(task.exception()).__name__}"

    def hang_up(self, client: Any) -> None:
        """A client has gone."""
        task = self.asking.pop(client.number, None)
        if task is not None and not task.done():
            task.cancel()
            self.breathe()
        else:
            self.loop.run_until_complete(self.llm.abort(client.internal, internal=True))

    def breathe(self) -> None:
        """Let the front end's tasks go on."""
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    def receive(self, outputs: Iterable[Any], clients: Iterable[Any]) -> None:
        """Outputs of the engine core arrive, and each client reads what is its own."""
        processed = self.processor.process_outputs(list(outputs))
        self.loop.run_until_complete(self.abort_requests_async(processed.reqs_to_abort))
        if self.asking:
            self.breathe()
        for client in clients:
            self.sent(client)
            _read(client)


def _read(client: Any) -> None:
    try:
        while not client.end and (output := client.queue.get_nowait()) is not None:
            for sample in output.outputs:
                for token in sample.token_ids:
                    client.wrong |= token != client.token(client.got)
                    client.got += 1
                client.end = sample.finish_reason or client.end
    except Exception as error:
        client.end = f"refused: {type(error).__name__}"


def _request(client: Any) -> Any:
    """A request as the release's front end makes them; what it does not name is None."""
    names = EngineCoreRequest.__struct_fields__
    values: dict[str, Any] = dict.fromkeys(names[: len(names) - len(EngineCoreRequest.__struct_defaults__)])
    values.update(
        request_id=client.name,
        prompt_token_ids=client.prompt,
        sampling_params=SamplingParams(
            max_tokens=client.outputs, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        ),
        arrival_time=float(client.number),
        client_index=0,
    )
    return EngineCoreRequest(**values)
