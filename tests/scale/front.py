# mypy: disable-error-code="import-not-found"
"""A release's front end: its real `AsyncLLM` and `OutputProcessor`, with no process, socket or tokenizer."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector


class FrontEnd:
    """One API server. What it sends waits in `inputs`, and aborts in the engine core's second queue, too."""

    def __init__(self, core: Any, adapters: Path) -> None:
        self.core, self.adapters = core, adapters
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
        self.sessions: set[int] = set()  # clients that have not said yet that there are no more prompts

    # What the release calls: its client of the engine core

    async def add_request_async(self, request: Any) -> None:
        sent = copy.copy(request)  # as to another process: both sides extend a session's prompt
        sent.prompt_token_ids = list(request.prompt_token_ids)
        self.inputs.append(("add", sent))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids:
            self.core.aborts_queue.put_nowait(request_ids)
            self.inputs.append(("abort", request_ids))

    # What a client does

    def ask(self, client: Any) -> None:
        """Bring in a client's request: the release names it, takes it in, and sends it when it may."""
        request = self._request(client, client.prompt)
        InputProcessor.assign_request_id(request)
        client.internal = request.request_id
        client.queue = RequestOutputCollector(RequestOutputKind.DELTA, client.internal)
        if client.turns:
            request.resumable = True
            self.sessions.add(client.number)
        sending = self.llm._add_request(request, None, None, 0, client.queue)
        self.asking[client.number] = self.loop.create_task(sending)
        self.breathe()
        self.sent(client)
        while client.eager and client.number in self.sessions and client.number not in self.asking and not client.end:
            self.next_turn(client)

    def next_turn(self, client: Any) -> None:
        """A session goes on with its next prompt; after the last one it says that there are no more."""
        request = self._request(client, client.turns.pop(0) if client.turns else [0])
        request.request_id, request.external_req_id = client.internal, client.name
        request.resumable = request.prompt_token_ids != [0]
        if not request.resumable:
            self.sessions.discard(client.number)
        self.loop.run_until_complete(self.llm._add_request(request, None, None, 0, client.queue))

    def sent(self, client: Any) -> None:
        """See whether a client's request was sent by now, or refused."""
        task = self.asking.get(client.number)
        if task is not None and task.done():
            del self.asking[client.number]
            if task.exception() is not None:
                client.end = f"refused: {type(task.exception()).__name__}"

    def hang_up(self, client: Any) -> None:
        """A client has gone."""
        self.sessions.discard(client.number)
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
            turns = client.ended_turns
            _read(client)
            if client.ended_turns > turns and client.number in self.sessions:
                self.next_turn(client)
                _read(client)

    def _request(self, client: Any, prompt: list[int]) -> Any:
        """A request as the release's front end makes them; what it does not name is None."""
        names = EngineCoreRequest.__struct_fields__
        values: dict[str, Any] = dict.fromkeys(names[: len(names) - len(EngineCoreRequest.__struct_defaults__)])
        values.update(
            request_id=client.name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=client.outputs, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
            ),
            arrival_time=float(client.number),
            client_index=0,
            resumable=False,
            lora_request=self._adapter(client.adapter) if client.adapter else None,
        )
        return EngineCoreRequest(**values)

    def _adapter(self, number: int) -> LoRARequest:
        """A LoRA adapter, whose files are there: what a bundle does without an identity is less than it does with one."""
        place = self.adapters / f"adapter {number}"
        if not place.exists():
            place.mkdir()
            (place / "adapter_model.safetensors").write_text(place.name, encoding="utf-8")
        return LoRARequest(place.name, number, str(place))


def _read(client: Any) -> None:
    try:
        while not client.end and (output := client.queue.get_nowait()) is not None:
            reason = "length"
            for sample in output.outputs:
                for token in sample.token_ids:
                    client.wrong |= token != client.token(client.got - client.outputs * client.ended_turns)
                    client.got += 1
                client.ended_turns += sample.finish_reason is not None
                reason = sample.finish_reason or reason
            if output.finished:
                client.end = reason
    except Exception as error:
        client.end = f"refused: {type(error).__name__}"
