# mypy: disable-error-code="import-not-found"
"""A release's engine core without processes: its real scheduler, connectors and adapters, on both sides, step by step.

Stood in for are the model, whose token says whose it is and which, and LMCache's server (`lmcache_double`). Requests
come in as a front end brings them: the release names them, the engine core takes them in, and answers go to whoever has
that name at the time.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import real_scheduler as real
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.input_processor import InputProcessor

BLOCK = real.BLOCK_SIZE


@dataclass
class Client:
    """One request of somebody's, and what came of it. `number` is its own, whatever name it comes by."""

    number: int
    name: str
    prompt: list[int]
    outputs: int
    patience: int = 0  # in how many steps it hangs up; 0 is never
    again: bool = False  # whether it then tries again
    internal: str = ""
    got: int = 0
    end: str = ""
    wrong: bool = False
    left: bool = False

    def token(self, place: int) -> int:
        """Its answer's token at a place."""
        return 3 + (self.number * 7919 + place * 31) % 240

    def outcome(self) -> str:
        """What it came to, in a word or two."""
        if self.wrong:
            return "another's token"
        if self.left:
            return "left"
        if self.end == "length" and self.got != self.outputs:
            return "another length"
        return self.end or "never ends"


class Engine:
    """An engine core, and the clients of it. `connector` is a module and class, or None; `blocks` is the pool's size.

    `pickled`: the scheduler's word to its worker is copied, as to another process.
    """

    def __init__(
        self,
        model_config: Any,
        connector: tuple[str, str] | None,
        *,
        mode: str = "AsyncScheduler",
        blocks: int = 512,
        budget: int = 512,
        running: int = 64,
        windows: Sequence[int] = (),
        v2: bool = False,
        extra: Mapping[str, Any] | None = None,
        pickled: bool = True,
    ) -> None:
        real.NUM_BLOCKS = blocks
        options = {"max_num_seqs": running, "max_num_batched_tokens": max(budget, real.MAX_MODEL_LEN)}
        self.scheduler = real.make_scheduler(mode, model_config, connector, windows, 0, options, extra)
        self.scheduler.max_num_scheduled_tokens = budget
        if v2:
            self.scheduler.use_v2_model_runner = True
        self.ahead = int(mode == "AsyncScheduler")
        self.worker = _worker(self.scheduler) if connector else None
        self.pickled = pickled
        self.core = object.__new__(EngineCoreProc)
        self.core.scheduler = self.scheduler
        self.core.structured_output_manager = self.scheduler.structured_output_manager
        self.core.request_block_hasher = get_request_block_hasher(BLOCK, sha256)
        self.core.mm_receiver_cache = None
        self.core.output_queue = queue.Queue()
        self.core.engine_index = 0
        self.clients: dict[str, Client] = {}
        self.unanswered: deque[tuple[Any, Any, dict[str, tuple[Client | None, int]]]] = deque()
        self.now = 0
        self.preempted = 0

    def roots(self) -> list[Any]:
        """The release's objects that patches may leave attributes on."""
        sides = [self.scheduler.connector, self.worker]
        found = [getattr(side, name, None) for side in sides for name in ("scheduler_adapter", "worker_adapter")]
        return [thing for thing in (self.scheduler, self.core, *sides, *found) if thing is not None]

    def come(self, client: Client) -> None:
        """A client's request is named and taken in."""
        request = _request(client)
        InputProcessor.assign_request_id(request)
        client.internal = request.request_id
        self.clients[client.internal] = client
        self.core.add_request(*self.core.preprocess_add_request(request))
        self._deliver_queued()

    def leave(self, client: Client) -> None:
        """A client hangs up: its front end forgets it, and has the engine core end it."""
        client.left = True
        if self.clients.get(client.internal) is client:
            del self.clients[client.internal]
        self.core.abort_requests([client.internal])

    def step(self) -> None:
        """Schedule a step, and answer the oldest that is due."""
        self.now += 1
        scheduled = self.scheduler.schedule()
        self.preempted += len(getattr(scheduled, "preempted_req_ids", None) or ())
        starts = real.computed_before(scheduled)
        whose: dict[str, tuple[Client | None, int]] = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            client, end = self.clients.get(name), starts[name] + count
            samples = end >= self.scheduler.requests[name].num_tokens
            whose[name] = client, end - len(client.prompt) if client and samples else -1
        sent = scheduled.kv_connector_metadata
        self.unanswered.append((scheduled, pickle.dumps(sent) if self.pickled else sent, whose))
        if len(self.unanswered) > self.ahead:
            self.answer()

    def answer(self) -> None:
        """Let workers and model run the oldest step, and give the clients what comes of it."""
        scheduled, metadata, whose = self.unanswered.popleft()
        output = real.run_model(scheduled)
        output.sampled_token_ids = [
            [client.token(place) if client else 0] if place >= 0 else [] for client, place in whose.values()
        ]
        if self.worker is not None:
            output.kv_connector_output = self.work(pickle.loads(metadata) if self.pickled else metadata, scheduled)
        for outputs in (self.scheduler.update_from_output(scheduled, output) or {}).values():
            self._deliver(outputs.outputs)

    def work(self, metadata: Any, scheduled: Any) -> Any:
        """What the worker's connector does in a step, as the model runner calls it."""
        worker = self.worker
        worker.bind_connector_metadata(metadata)
        worker.handle_preemptions(metadata)
        worker.start_load_kv(None)
        if scheduled.num_scheduled_tokens:
            worker.wait_for_save()
        output = _transfers(worker, scheduled.finished_req_ids)
        worker.clear_connector_metadata()
        return output

    def reset(self) -> None:
        """Preempt all that runs, and empty the prefix cache."""
        with contextlib.suppress(RuntimeError):  # it says so where loads hold blocks
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _deliver(self, outputs: Iterable[Any]) -> None:
        for one in outputs:
            client = self.clients.get(one.request_id)
            if client is None:
                continue
            for token in one.new_token_ids:
                client.wrong |= token != client.token(client.got)
                client.got += 1
            if one.finish_reason is not None:
                client.end = str(one.finish_reason).rpartition(".")[2].lower()
                del self.clients[one.request_id]

    def _deliver_queued(self) -> None:
        while not self.core.output_queue.empty():
            self._deliver(self.core.output_queue.get()[1].outputs)


def _worker(scheduler: Any) -> Any:
    """The worker's side of the scheduler's connector, made as the release's worker process makes it."""
    config = scheduler.vllm_config
    with set_current_vllm_config(config):
        return KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, scheduler.kv_cache_config)


def _transfers(worker: Any, ended: set[str]) -> Any:
    """What a worker says of its transfers at a step's end, by the method that the release's model runner asks."""
    if hasattr(KVConnectorBase_V1, "get_transfer_results"):
        results = worker.get_transfer_results(ended)
        output = real.transfers(results.finished_recving or (), results.finished_sending or ())
        output.failed_recving = results.failed_recving
    else:
        sent, received = worker.get_finished(ended)
        output = real.transfers(received or (), sent or ())
    output.invalid_block_ids = worker.get_block_ids_with_load_errors()
    return output


def _request(client: Client) -> Any:
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
