"""A release's real prefill and decode, scheduler and worker of each, between which KV goes while it is computed.

Prefill steps as a worker of the release's does, with its own order of calls to the connector; a model that writes one
number into each block stands for one. What leaves goes through Mooncake's real engine, by way of a link of ours that
notes how many blocks each write brings, and can hold or refuse one. A driver's first argument is PATIENCE: how many
seconds to wait for what never comes.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import attempted, begin_driver, leave, print_result, wait

begin_driver()

import gc
import os
import sys
import tempfile
from pathlib import Path

import calm

calm.keep()

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import mooncake_sides as sides
import real_scheduler as real
import vllm
from model_runner import Runner
from mooncake_sides import BLOCKS, LAYERS, Side, decoding
from ports import free_port
from vllm import SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

gc.enable()

PATIENCE = float(sys.argv[1]) if sys.argv[1:] else 5.0
SIZE = 32
"""Tokens of a block."""
CHUNK = 2 * SIZE
"""Tokens of a step."""
PROMPT = 7 * SIZE + SIZE // 2
"""Tokens of a prompt, unless another is given: seven whole blocks and a half."""
OLD = -1.0
"""What is in decode's blocks before."""
ABORT = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"


class Link:
    """In the place of Mooncake's engine, in front of it."""

    def __init__(self, engine: Any, block_bytes: int) -> None:
        self._engine, self._block_bytes = engine, block_bytes
        self.writes: list[float] = []  # blocks of each, since this was emptied
        self.bytes = 0  # of all of them
        self.begun = self.ended = 0
        self.open = threading.Event()
        self.open.set()
        self.refuse = 0
        self.refused: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def batch_transfer_sync_write(self, session: str, sources: Any, places: Any, lengths: Any) -> int:
        self.writes.append(round(sum(lengths) / self._block_bytes, 2))
        self.bytes += sum(lengths)
        self.begun += 1
        self.open.wait()
        if self.refuse:
            self.refuse -= 1
            self.refused.append((session, sources, places, lengths))
            answer = -1
        else:
            answer = self._engine.batch_transfer_sync_write(session, sources, places, lengths)
        self.ended += 1
        return answer

    def blocks(self) -> float:
        """That all writes brought."""
        return self.bytes / self._block_bytes

    def later(self) -> None:
        """What was refused is written after all, as Mooncake may."""
        for call in self.refused:
            self._engine.batch_transfer_sync_write(*call)
        self.refused.clear()


def linked(side: Side) -> Link:
    """A link in front of a worker's engine."""
    side.worker.engine = link = Link(side.worker.engine, side.cache.nbytes * len(LAYERS) // BLOCKS)
    return link


def block_sizes(groups: list[Any]) -> dict[str, int]:
    """What the engine core tells the scheduler of groups whose blocks differ in size."""
    largest = max(group.kv_cache_spec.block_size for group in groups)
    return {"block_size": SIZE} if largest == SIZE else {"block_size": largest, "hash_block_size": SIZE}


class Engine:
    """The release's scheduler, its connector's worker, and a model that writes numbers."""

    v2: ClassVar[bool] = False
    """Whether the worker asks its connector as the V2 model runner does."""

    def __init__(self, model_config: Any, role: str, side: Side) -> None:
        self.side = side
        self.worker = side.worker
        self.config = config = sides.make_config(model_config, role, side.engine_id, {}, side.size)
        config.scheduler_config.max_num_batched_tokens = 4 * CHUNK
        config.scheduler_config.max_num_scheduled_tokens = 4 * CHUNK
        config.scheduler_config.long_prefill_token_threshold = CHUNK
        config.cache_config.num_gpu_blocks = BLOCKS
        config.cache_config.enable_prefix_caching = sides.MODEL.prefix_caching
        groups = sides.MODEL.groups(side.heads)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(config),
            **block_sizes(groups),
            log_stats=True,
        )
        self.runner = Runner(config, side.connector, v2=True) if self.v2 else None
        self.free = real.free_blocks(self.scheduler)
        self.again = 0.0  # added to what the model writes

    def add(self, name: str, prompt: int = PROMPT, content: int = 0, tokens: int = 1, **parameters: Any) -> Any:
        """A request, of as many tokens; those with one `content` have one prompt. `parameters` are the transfer's."""
        request = Request(
            request_id=name,
            prompt_token_ids=[1 + content] * prompt,
            sampling_params=SamplingParams(
                max_tokens=tokens, ignore_eos=True, extra_args={"kv_transfer_params": parameters or None}
            ),
            pooling_params=None,
            block_hasher=get_request_block_hasher(SIZE, sha256),
            **real.end_token_named_per_request(),
        )
        self.scheduler.add_request(request)
        return request

    def taken(self) -> int:
        """Blocks that are not free."""
        return int(self.free - real.free_blocks(self.scheduler))

    def fill(self, number: int) -> None:
        """Other prompts, of eight blocks each, are computed in whatever is free."""
        for one in range(number):
            self.add(f"fill-{one}", content=40 + one)
        for _ in range(8 * number):
            self.step()

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        # In newer releases a request that is alone may have all of a step's tokens.
        self.scheduler.max_num_scheduled_tokens = CHUNK * max(1, self.scheduler.get_num_unfinished_requests())
        scheduled = self.scheduler.schedule()
        self.scheduler.update_from_output(scheduled, self.work(scheduled))

    def work(self, scheduled: Any) -> Any:
        """What a worker does in a step."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.side.connector
        mixin = KVConnectorModelRunnerMixin
        if scheduled.total_num_scheduled_tokens or self.runner is not None:
            asked = self.runner.step(scheduled) if self.runner else mixin.maybe_get_kv_connector_output(scheduled)
            with set_forward_context(None, self.config), asked as connector_output:
                self.forward(scheduled)
            output = real.run_model(scheduled)
            for number, name in enumerate(output.req_ids):
                if not self.at_the_end(name, scheduled):
                    output.sampled_token_ids[number] = []
            output.kv_connector_output = connector_output
        else:
            output = mixin.kv_connector_no_forward(scheduled, self.config)
        return output

    def blocks(self, name: str) -> list[int]:
        """What a request has, also one that has ended while a transfer is not over."""
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return list(blocks)

    def computed(self, blocks: list[int], content: int) -> bool:
        """Whether blocks hold what was computed for the first ones of a prompt."""
        return self.side.holds(blocks) == [contents(content, place, SIZE) for place in range(len(blocks))]

    def at_the_end(self, name: str, scheduled: Any) -> bool:
        request = self.scheduler.requests.get(name)
        return request is None or bool(request.num_computed_tokens >= request.num_prompt_tokens)

    def written(self, scheduled: Any) -> Iterator[tuple[int, int, int, int]]:
        """The blocks that a step writes into: which, of which prompt, where in it, and how many tokens it has then."""
        computed = real.computed_before(scheduled)
        for name, tokens in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            begin, end = computed[name], computed[name] + tokens
            for place in range(begin // SIZE, -(-end // SIZE)):
                yield blocks[place], request.prompt_token_ids[0] - 1, place, min(end - place * SIZE, SIZE)

    def forward(self, scheduled: Any) -> None:
        """Each block gets a number that says of which prompt it is, where, and how many tokens are in it."""
        for block, *what in self.written(scheduled):
            self.side.cache.select(self.side.dimension, block).fill_(self.again + contents(*what))


class Prefill(Engine):
    """A prefill engine, behind a link of ours."""

    def __init__(self, model_config: Any, port: int, side: Side | None = None) -> None:
        super().__init__(model_config, "kv_producer", side or Side(model_config, "kv_producer", "prefill", port))
        self.link = linked(self.side)

    def compute(
        self, name: str, prompt: int = PROMPT, content: int = 0, tokens: int = 1, transfer: str | None = None
    ) -> Any:
        """A request whose KV a decode engine fetches."""
        return self.add(f"p-{name}", prompt, content, tokens, do_remote_decode=True, transfer_id=transfer or name)


def contents(content: int, place: int, tokens: int) -> float:
    return 10000.0 * content + 100.0 * place + tokens


class Pair:
    def __init__(self, model_config: Any, prefill: type[Prefill] = Prefill) -> None:
        self.prefill = prefill(model_config, free_port())
        self.decode = Side(model_config, "kv_consumer", "decode", free_port())
        self.decoding = Engine(model_config, "kv_consumer", self.decode)
        self._next = 1

    def ask(self, name: str, blocks: int = 8, arrives: bool = True, transfer: str | None = None) -> list[int]:
        """Decode asks for the last blocks of a prompt; which of its own they go to."""
        places = self.places(name, blocks, transfer)
        self.decode.step()
        if arrives:
            assert wait(lambda: (transfer or name) in self.prefill.worker.reqs_need_send)
        return places

    def places(self, name: str, blocks: int = 8, transfer: str | None = None) -> list[int]:
        """The same, with decode's next step."""
        if self._next + blocks > BLOCKS:
            self._next = 1
        places = list(range(self._next, self._next + blocks))[::-1]  # no run of neighbours
        self._next += blocks
        for cache in self.decode.caches.values():
            for number in places:
                cache.select(self.decode.dimension, number).fill_(OLD)
        self.decode.invalid.difference_update(places)
        self.decode.admit(decoding(f"d-{name}", transfer or name, blocks, self.prefill.side), places)
        return places

    def lets_go(self, name: str) -> None:
        """A client of decode's hangs up: prefill is asked for nothing, but to let go."""
        self.decode.finish(decoding(f"d-{name}-over", name, 2, self.prefill.side), [], "FINISHED_ABORTED")
        self.decode.step()

    def settled(self) -> bool:
        """Whether nothing that left early is under way any more."""
        link, worker = self.prefill.link, self.prefill.worker

        async def idle() -> bool:
            writes = getattr(worker, "_livepatch_writes", None)
            return writes is None or not any(part.under_way for part in writes._parts())

        def now() -> bool:
            return asyncio.run_coroutine_threadsafe(idle(), worker.sender_loop).result()

        return wait(lambda: now() and link.begun == link.ended)

    def closed(self) -> bool:
        """Whether nothing more is begun early of what is asked for now."""
        writes, loop = getattr(self.prefill.worker, "_livepatch_writes", None), self.prefill.worker.sender_loop

        async def all_closed() -> bool:
            return all(part.closed for part in writes._parts())

        return writes is None or asyncio.run_coroutine_threadsafe(all_closed(), loop).result()

    def came(self, places: list[int], *, content: int = 0, prompt: int = PROMPT, again: float = 0.0) -> int | str:
        """How many of decode's blocks hold what they are to hold, from the first on; or what is wrong."""
        whole = -(-prompt // SIZE)
        first = whole - len(places)
        right = [again + contents(content, place, min(prompt - place * SIZE, SIZE)) for place in range(first, whole)]
        found = self.decode.holds(places)
        number = sum(one == other for one, other in zip(found, right, strict=True))
        return number if found[:number] == right[:number] and set(found[number:]) <= {OLD} else f"wrong: {found}"

    def outcome(self, name: str, places: list[int], patience: float = sides.SECONDS) -> str:
        def heard() -> bool:
            self.decode.step()
            return f"d-{name}" in self.decode.received

        if not wait(heard, patience):
            return "nothing is told"
        return "failed" if set(places) <= self.decode.invalid else "loaded"

    def end(self, name: str, places: list[int], **what: Any) -> list[Any]:
        """Prefill goes on to its end, and gives the blocks back: what decode was told, and has."""

        def over() -> bool:
            self.prefill.step()
            return f"p-{name}" not in self.prefill.scheduler.requests

        assert wait(over)
        return [self.outcome(name, places), self.came(places, **what)]

    def left(self) -> int:
        """Blocks of prefill's that do not come back."""

        def back() -> bool:
            if self.prefill.scheduler.requests:
                self.prefill.step()
            return not self.prefill.taken()

        wait(back, 5)
        return self.prefill.taken()


def wait_at_most(seconds: float) -> None:
    """How long a step waits for an early write."""
    if (module := early_module()) is not None:
        module.BACK_SECONDS = seconds


def expired(pair: Pair, name: str) -> bool:
    """As if the time had passed after which the release gives up what it could not send; whether it had to."""
    kept = pair.prefill.worker.reqs_need_send
    entry = next((entry for entry in kept.values() if entry.p_req_id == f"p-{name}"), None)
    if entry is None or entry.expire_time == float("inf"):
        return False
    entry.expire_time = 0.0
    pair.prefill.fill(1)  # steps
    return all(one is not entry for one in kept.values())


def early_module() -> Any:
    """The patch's module of that name; None on stock."""
    found = [module for name, module in list(sys.modules.items()) if name.endswith("mooncake_layerwise.early")]
    return found[0] if found else None


def any_size_by_layer() -> None:
    """The blocks of these models are small: by layer they go all the same."""
    if (module := early_module()) is not None:
        module.LAYERS_BYTES = 0


def played(cases: Iterable[Callable[[Any], Any]], pair: Any, chosen: Sequence[str] = ()) -> dict[str, Any]:
    """What each case came to; of those that are chosen, where any is."""
    return {case.__name__: attempted(partial(case, pair)) for case in cases if not chosen or case.__name__ in chosen}


def found(play: Callable[[Any], Any], *model: Any, **others: Any) -> Any:
    """Return what comes of `play`, which is given a model's configuration."""
    real.quiet()
    os.environ[ABORT] = "600"
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory), *model, **others)
        sides.begin_distributed(model_config, Path(directory) / "rendezvous")
        init_none_hash(sha256)
        return play(model_config)


def drive(play: Callable[[Any], Any], *model: Any, word: str = "cases", **others: Any) -> None:
    """Print what comes of `play`, which is given a model's configuration, and end this process."""
    print_result({"pid": os.getpid(), word: found(play, *model, **others)}, vllm)
    leave()
