# mypy: disable-error-code="import-not-found"
"""A release's engine without processes: its real front end, scheduler, connectors and adapters, on both sides.

Stood in for are the model, whose token says whose it is and which, and LMCache's server (`lmcache_double`).
"""

from __future__ import annotations

import contextlib
import pickle
import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import real_scheduler as real
from vllm.config import SpeculativeConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine.core import EngineCoreProc

from tests.scale.front import FrontEnd

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
    turns: list[list[int]] = field(default_factory=list)  # of a session: the prompts that follow
    eager: bool = False  # whether it sends them all at once
    adapter: int = 0  # the number of its LoRA adapter; 0 is none
    internal: str = ""
    got: int = 0
    ended_turns: int = 0
    end: str = ""
    wrong: bool = False
    left: bool = False
    queue: Any = None

    def token(self, place: int) -> int:
        """Its answer's token at a place."""
        return self.token_of(self.number, place)

    @staticmethod
    def token_of(number: int, place: int) -> int:
        """The same, of the client with a number."""
        return 3 + (number * 7919 + place * 31) % 240

    def outcome(self) -> str:
        """What it came to, in a word or two."""
        if self.wrong:
            return "another's token"
        if self.left:
            return "left"
        if self.end == "length" and self.got != self.outputs * self.ended_turns:
            return "another length"
        return self.end or "never ends"


@dataclass
class Sampled:
    """One request in a step: whose it is, the place of its next token (None: its prompt is not computed), and its drafts."""

    request: Any
    number: int
    place: int | None
    drafts: int


class Engine:
    """An engine core, and the clients of it. `connector` is a module and class, or None; `blocks` is the pool's size.

    `pickled`: the scheduler's word to its worker is copied, as to another process. `adapters` is `max_loras`, `drafts` how
    many tokens a draft model proposes, `stages` how many pipeline stages there are (and steps are under way).
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
        adapters: int = 0,
        drafts: int = 0,
        stages: int = 1,
    ) -> None:
        real.NUM_BLOCKS = blocks
        options = {"max_num_seqs": running, "max_num_batched_tokens": max(budget, real.MAX_MODEL_LEN)}
        config = real.make_config(mode, model_config, connector, adapters, options, extra)
        self.drafts = drafts
        if drafts:
            config.speculative_config = _speculation(config, drafts)
        if stages > 1:
            config.parallel_config.pipeline_parallel_size = config.parallel_config.world_size = stages
        self.scheduler = real.scheduler_of(mode, config, windows)
        self.scheduler.max_num_scheduled_tokens = budget
        if v2:
            self.scheduler.use_v2_model_runner = True
        overlaps = mode == "AsyncScheduler"
        # The V2 runner overlaps steps also where there are stages; the configuration here does not know that it is V2's.
        self.ahead = config.max_concurrent_batches - 1 + (overlaps and v2) if stages > 1 else int(overlaps)
        self.worker: Any = _worker(self.scheduler) if connector else None
        self.pickled = pickled
        self.core = object.__new__(EngineCoreProc)
        self.core.scheduler = self.scheduler
        self.core.structured_output_manager = self.scheduler.structured_output_manager
        self.core.request_block_hasher = get_request_block_hasher(BLOCK, sha256)
        self.core.mm_receiver_cache = None
        self.core.output_queue, self.core.aborts_queue = queue.Queue(), queue.Queue()
        self.core.engine_index = 0
        self.front = FrontEnd(self.core, Path(model_config.model))
        self.clients: dict[int, Client] = {}  # by number, until they have ended or left
        self.unanswered: deque[tuple[Any, Any, list[Sampled]]] = deque()
        self.now = 0
        self.preempted = 0

    def roots(self) -> list[Any]:
        """The release's objects that patches may leave attributes on."""
        sides = [self.scheduler.connector, self.worker]
        found = [getattr(side, name, None) for side in sides for name in ("scheduler_adapter", "worker_adapter")]
        return [thing for thing in (self.scheduler, self.core, *sides, *found) if thing is not None]

    def come(self, client: Client) -> None:
        """A client comes with a request."""
        self.clients[client.number] = client
        self.front.ask(client)

    def leave(self, client: Client) -> None:
        """A client hangs up."""
        client.left = True
        self.clients.pop(client.number, None)
        self.front.hang_up(client)

    def step(self) -> None:
        """Take in what has come, schedule a step, and answer the oldest that is due."""
        self.now += 1
        while self.front.inputs:
            kind, what = self.front.inputs.popleft()
            if kind == "abort":
                self.core.abort_requests(what)
            else:
                self.core.add_request(*self.core.preprocess_add_request(what))
        scheduled = self.scheduler.schedule()
        self.preempted += len(getattr(scheduled, "preempted_req_ids", None) or ())
        sent = scheduled.kv_connector_metadata
        self.unanswered.append((scheduled, pickle.dumps(sent) if self.pickled else sent, list(self.sampled(scheduled))))
        if len(self.unanswered) > self.ahead:
            self.answer()

    def sampled(self, scheduled: Any) -> Iterator[Sampled]:
        """What the model is to make of each request of a step."""
        starts, requests = real.computed_before(scheduled), self.scheduler.requests
        for name, count in scheduled.num_scheduled_tokens.items():
            request, drafts = requests[name], len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            end = starts[name] + count - drafts
            place = end - request.num_prompt_tokens if end >= request.num_tokens else None
            yield Sampled(request, int(request.arrival_time), place, drafts)

    def tokens(self, sampled: Sampled) -> list[int]:
        """The next tokens of a client's answer. Of drafts, as many are accepted as the client and the place say."""
        if sampled.place is None:
            return []
        if not self.drafts:
            return [Client.token_of(sampled.number, sampled.place)]
        place = sampled.request.num_output_tokens  # the steps before have said by now how many were accepted
        accepted = min(sampled.drafts, (sampled.number + place) % (self.drafts + 1))
        return [Client.token_of(sampled.number, place + more) for more in range(accepted + 1)]

    def answer(self) -> None:
        """Let workers and model run the oldest step, and give the clients what comes of it."""
        scheduled, metadata, sampled = self.unanswered.popleft()
        output = real.run_model(scheduled)
        output.sampled_token_ids = [self.tokens(one) for one in sampled]
        if self.worker is not None:
            output.kv_connector_output = self.work(pickle.loads(metadata) if self.pickled else metadata, scheduled)
        self.core._process_aborts_queue()
        answers = list((self.scheduler.update_from_output(scheduled, output) or {}).values())
        while not self.core.output_queue.empty():
            answers.append(self.core.output_queue.get()[1])
        outputs = [one for answer in answers for one in answer.outputs]
        self.front.receive(outputs, list(self.clients.values()))
        self.clients = {number: client for number, client in self.clients.items() if not client.end}

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


def _speculation(config: Any, drafts: int) -> Any:
    """Speculative decoding that needs no second model."""
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=drafts,
        prompt_lookup_max=2,
        prompt_lookup_min=1,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )


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
