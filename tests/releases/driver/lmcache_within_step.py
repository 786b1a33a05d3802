"""LMCache in the engine's process: loads within the step that fail, and what is stored of them. One JSON object.

Run by a fresh interpreter with the releases' sources, and the bundle or not, on PYTHONPATH. The scheduler, vLLM's
LMCacheConnectorV1 and LMCache's LMCacheConnectorV1Impl on both sides are the releases' own; the Impl is made without its
constructor. Stood in for are LMCache's engine, which copies between GPU and store (`Engine`), and the model. Slots and
stored chunks have contents: the tokens up to each one's own. Several workers, in this one process, have an engine and slots
each, and a client each of a real TCPStore; what one of them has lost, those of its stage and of later ones compute on.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import begin_driver, print_result, raised

begin_driver()

import copy
import gc
import pickle
import sys
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import native_double

native_double.stand_in()

import lmcache

native_double.device_ops(lmcache)
import real_scheduler as real
import torch
import vllm
from lmcache.integration.vllm import vllm_v1_adapter as adapter
from lmcache.v1.config import LMCacheEngineConfig
from torch.distributed import TCPStore, distributed_c10d
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
from worlds import RIGHT, WRONG, Serving, Work

gc.enable()

ANSWER = 6
BLOCK = real.BLOCK_SIZE
CHUNK = 2 * BLOCK
PROMPT = 3 * CHUNK + 5
LOST = object()
"""What is in a slot that was not loaded, or that was computed on such a one."""

adapter.get_pp_group = lambda: SimpleNamespace(is_last_rank=True)


class Engine:
    """Chunks of CHUNK tokens by what leads to them. One that is there is not stored again, as in LMCache's CPU backend."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[int, ...], list[Any]] = {}
        self.gone: set[tuple[int, ...]] = set()
        """Chunks that the lookup finds and the load does not."""

    def lookup(self, tokens: Any, **_: Any) -> int:
        hit = 0
        while hit + CHUNK <= len(tokens) and tuple(tokens[: hit + CHUNK]) in self.chunks:
            hit += CHUNK
        return hit

    def retrieve(self, tokens: Any, mask: Any, *, kvcaches: Any, slot_mapping: Any, **_: Any) -> Any:
        loaded = torch.zeros(len(tokens), dtype=torch.bool)
        for start in range(0, len(tokens) // CHUNK * CHUNK, CHUNK):
            key = tuple(tokens[: start + CHUNK])
            if not mask[start]:
                continue
            if key in self.gone or key not in self.chunks:
                self.gone.discard(key)
                self.chunks.pop(key, None)
                break
            for place, content in zip(range(start, start + CHUNK), self.chunks[key], strict=True):
                kvcaches[0][int(slot_mapping[place])] = content
                loaded[place] = True
        return loaded

    def store(self, tokens: Any, mask: Any, *, kvcaches: Any, slot_mapping: Any, **_: Any) -> None:
        for start in range(0, len(tokens) // CHUNK * CHUNK, CHUNK):
            key = tuple(tokens[: start + CHUNK])
            if mask[start] and key not in self.chunks:
                slots = [int(slot_mapping[place]) for place in range(start, start + CHUNK)]
                self.chunks[key] = [kvcaches[0].get(slot) for slot in slots]

    def lookup_unpin(self, name: str) -> None: ...


ENGINES: list[Engine] = []
"""A world's, by worker."""


def lookup_client() -> Any:
    """Its answer is the least of the workers' hits, as LMCache's."""
    return SimpleNamespace(
        lookup_cache=lambda lookup_id: -1,
        lookup=lambda tokens, lookup_id, request_configs=None: min(e.lookup(list(tokens)) for e in ENGINES),
        clear_lookup_status=lambda name: None,
        cancel_lookup=lambda name: None,
    )


OPTIONS: dict[str, Any] = {}
"""Attributes of an Impl that are to be others than those here."""


class InProcess(LMCacheConnectorV1):  # type: ignore[misc]
    """vLLM's connector around LMCache's, without what those start: servers, threads, pinned memory."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, *([kv_cache_config] if kv_cache_config else []))
        impl = object.__new__(adapter.LMCacheConnectorV1Impl)
        working = role == KVConnectorRole.WORKER
        engine = ENGINES[vllm_config.parallel_config.rank] if working else MagicMock()
        client = lookup_client() if role == KVConnectorRole.SCHEDULER else None
        given = {
            "_parent": self,
            "_vllm_config": vllm_config,
            "device": torch.device("cpu"),
            "kv_role": "kv_both",
            "config": LMCacheEngineConfig.from_defaults(chunk_size=CHUNK),
            "_manager": SimpleNamespace(lmcache_engine=engine, lookup_client=client),
            "lmcache_engine": engine,
            "lookup_client": client,
            "async_loading": False,
            "layerwise_retrievers": [],
            "_layerwise_save_storers": {},
            "_stats_monitor": MagicMock(),
            "_unfinished_requests": {},
            "use_layerwise": False,
            "enable_blending": False,
            "kv_caches": {},
            "_block_size": BLOCK,
            "load_specs": {},
            "kv_cache_manager": None,
            "_request_trackers": {},
            "_discard_partial_chunks": True,
            "_lmcache_chunk_size": CHUNK,
            "skip_last_n_tokens": 0,
            "num_layers": 1,
            "current_layer": 0,
            "force_skip_save": False,
            "_requests_priority": {},
            "_max_tokens_per_load": 0,
            "_invalid_block_ids": set(),
            **OPTIONS,
        }
        for name, value in given.items():
            if not isinstance(getattr(type(impl), name, None), property):
                setattr(impl, name, value)
        self._lmcache_engine = impl
        self._kv_cache_events = None


def worker_of(config: Any, kv_cache_config: Any, rank: int, workers: int, stages: int) -> Any:
    """A worker's connector, configured as vLLM does for each of its processes."""
    return InProcess(config_of(config, rank, workers, stages), KVConnectorRole.WORKER, kv_cache_config)


def config_of(config: Any, rank: int, workers: int, stages: int) -> Any:
    """A worker's configuration."""
    config = copy.copy(config)
    config.parallel_config = copy.copy(config.parallel_config)
    parallel = {"rank": rank, "world_size": workers, "pipeline_parallel_size": stages}
    for name, value in parallel.items():
        object.__setattr__(config.parallel_config, name, value)
    return config


def stores(number: int) -> list[TCPStore]:
    """A client for each process; the first has the server, too."""
    within = timedelta(seconds=60)
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=within)
    return [first, *(TCPStore("127.0.0.1", first.port, is_master=False, timeout=within) for _ in range(1, number))]


class World(Serving):
    """A scheduler, each worker's connector and slots, and what clients got."""

    def __init__(
        self,
        mode: str,
        model_config: Any,
        budget: int,
        workers: int = 1,
        stages: int = 1,
        later: bool = False,
        silent: int | None = None,
    ) -> None:
        """`later`: with speculative decoding, from vLLM 0.20, stores come when the step's failed loads were fetched.
        `silent`: a worker that tells the others nothing, as one without the patch."""
        ENGINES[:] = [Engine() for _ in range(workers)]
        options, connector = {"max_num_batched_tokens": budget}, ("lmcache_within_step", "InProcess")
        super().__init__(real.make_scheduler(mode, model_config, connector, options=options))
        self.scheduler.recompute_kv_load_failures = True
        config, kv_cache_config = self.scheduler.vllm_config, self.scheduler.kv_cache_config
        self.workers = [worker_of(config, kv_cache_config, rank, workers, stages) for rank in range(workers)]
        self.slots: list[dict[int, Any]] = [{} for _ in self.workers]
        for worker, slots in zip(self.workers, self.slots, strict=True):
            worker._lmcache_engine.kv_caches = {"layer0": slots}
        self.stage = workers // stages
        self.stores = stores(workers) if workers > 1 else []
        self.later = later
        self.silent = silent
        self.reported = 0
        self.loaded: set[str] = set()
        self.left: set[str] = set()

    def add(self, name: str, like: str = "", prompt: int = PROMPT) -> None:
        """A client comes; its prompt is its own, or that of the request `like`."""
        request = real.make_request(like or name, tokens=ANSWER, prompt=prompt)
        request.kv_transfer_params = None
        self.come(name, request)

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        work = self.work_of(scheduled)
        for request in scheduled.kv_connector_metadata.requests:
            if request.load_spec is not None and request.load_spec.can_load:
                self.loaded.add(request.req_id)
        self.unanswered.append((pickle.dumps(scheduled.kv_connector_metadata), scheduled, work))
        if len(self.unanswered) > self.ahead:
            self.answer(*self.unanswered.popleft())

    def worker(self, rank: int) -> Any:
        """In a process of its own, where the default process group's store is this worker's client of it."""
        if self.stores:
            distributed_c10d._get_default_store = lambda: self.stores[rank]
        return self.workers[rank]

    def answer(self, metadata: bytes, scheduled: Any, work: list[Work]) -> None:
        output = real.run_model(scheduled)
        ranks = range(len(self.workers))
        for rank in ranks:
            worker = self.worker(rank)
            # In a process of its own, a worker has a copy.
            worker.bind_connector_metadata(self.for_worker(rank, metadata))
            worker.start_load_kv(SimpleNamespace(attn_metadata=object()))
        for index, (name, (table,), start, end, samples) in enumerate(work):
            right = self.compute(name, table, start, end)
            output.sampled_token_ids[index] = [RIGHT if right else WRONG] if samples else []
        invalid: set[int] = set()
        for rank in ranks:
            worker = self.worker(rank)
            if work and not self.later:
                worker.wait_for_save()
            transfers = real.transfers(
                *(ended or () for ended in reversed(worker.get_finished(scheduled.finished_req_ids)))
            )
            invalid |= worker.get_block_ids_with_load_errors()
            if work and self.later:
                worker.wait_for_save()
            worker.clear_connector_metadata()
        transfers.invalid_block_ids = invalid
        self.reported += bool(invalid)
        output.kv_connector_output = transfers
        self.deliver(scheduled, output)

    def for_worker(self, rank: int, data: bytes) -> Any:
        metadata = pickle.loads(data)
        if rank == self.silent:
            vars(metadata).pop("_livepatch_loads", None)
        return metadata

    def compute(self, name: str, table: list[int], start: int, end: int) -> bool:
        """Each stage computes on what the workers of it have, and on what earlier stages computed; whether all is right."""
        places = [table[place // BLOCK] * BLOCK + place % BLOCK for place in range(end)]
        right = True
        for first in range(0, len(self.slots), self.stage):
            stage = self.slots[first : first + self.stage]
            right &= all(
                slots.get(places[place]) == self.content(name, place) for slots in stage for place in range(start)
            )
            for slots in stage:
                slots.update(
                    (places[place], self.content(name, place) if right else LOST) for place in range(start, end)
                )
        return right


def play(
    world: World, gone: int, between: Callable[[World], None], loser: int = 0, besides: Collection[str] = ()
) -> None:
    """A prompt is stored, and the prefix cache and LMCache lose parts of it: LMCache its last chunk, and, after the lookup,
    the worker `loser`'s the chunk `gone`. The second request's load fails; it computes, and what it has is stored. Others
    load that. The answers to requests of the names `besides` are not looked at."""
    world.add("first")
    world.steps(16)
    world.forget()
    keys = [tuple(world.prompts["first"][: (number + 1) * CHUNK]) for number in range(3)]
    world.expect(all(key in engine.chunks for key in keys for engine in ENGINES), "first stores nothing")
    for engine in ENGINES:
        engine.chunks.pop(keys[2])
    ENGINES[loser].gone.add(keys[gone])
    world.add("second", like="first")
    world.step()
    between(world)
    world.steps(24)
    world.expect(world.reported == 1, "no load failed")
    for name in ("third", "fourth"):
        world.forget()
        world.add(name, like="first")
        world.steps(24)
    for number, key in enumerate(keys):
        own = [world.content("first", place) for place in range(number * CHUNK, (number + 1) * CHUNK)]
        world.expect(all(e.chunks.get(key) == own for e in ENGINES), f"chunk {number} is stored wrong, or not")
    world.expect("fourth" in world.loaded, "fourth loads nothing")
    for name, tokens in world.clients.items():
        if name in besides:
            continue
        world.expect(WRONG not in tokens, f"{name} got a wrong token")
        world.expect(name in world.left or len(tokens) == ANSWER, f"{name} got another answer")
    world.expect(not world.scheduler.requests, "requests never end")


def nothing(world: World) -> None: ...


def next_too(world: World) -> None:
    """Another with the same prompt comes before the failure is known, where steps overlap."""
    world.add("next", like="first")


def hangs_up(world: World) -> None:
    """The client goes before the failure is known, where steps overlap; another has the same prompt."""
    real.abort(world.scheduler, "second")
    world.left.add("second")
    world.add("next", like="first")


def chats(world: World) -> None:
    """The client goes. Others get its blocks: first for prompts of less than a chunk, then for longer ones that begin so."""
    real.abort(world.scheduler, "second")
    world.left.add("second")
    for number in range(20):
        name = f"chat{number}"
        world.add(name, prompt=BLOCK + 4)
        world.steps(10)
        world.add(f"{name} goes on", like=name)
        world.steps(10)
        stored = ENGINES[0].lookup(world.prompts[f"{name} goes on"])
        world.expect(stored == 3 * CHUNK, "what is right is not stored")


CASES: dict[str, tuple[int, int, Callable[[World], None]]] = {
    # which chunk is gone, tokens of a step, what happens then
    "first_chunk": (0, real.MAX_MODEL_LEN, nothing),
    "second_chunk": (1, real.MAX_MODEL_LEN, nothing),
    "first_chunk_in_parts": (0, CHUNK, nothing),
    "second_chunk_in_parts": (1, CHUNK, nothing),
    "shared": (1, real.MAX_MODEL_LEN, next_too),
    "shared_in_parts": (0, CHUNK, next_too),
    "aborted": (1, real.MAX_MODEL_LEN, hangs_up),
    "aborted_in_parts": (0, CHUNK, hangs_up),
    "chats": (0, real.MAX_MODEL_LEN, chats),
}


SEVERAL: dict[str, tuple[str, int, dict[str, Any]]] = {
    # how it goes on one worker, whose load fails, of which workers
    "of_two_workers": ("second_chunk", 1, {"workers": 2}),
    "of_two_workers_in_parts": ("shared_in_parts", 0, {"workers": 2}),
    "of_two_stages": ("second_chunk", 0, {"workers": 2, "stages": 2}),
    "of_the_last_stage": ("second_chunk", 3, {"workers": 4, "stages": 2}),
    "one_is_silent": ("second_chunk", 1, {"workers": 2, "silent": 1}),
    "speculative": ("second_chunk", 0, {"later": True}),
    "speculative_of_two": ("second_chunk", 1, {"workers": 2, "later": True}),
}


def outcome(mode: str, model_config: Any, case: str, besides: Collection[str] = ()) -> str:
    case, loser, how = SEVERAL.get(case, (case, 0, {}))
    gone, budget, between = CASES[case]
    try:
        world = World(mode, model_config, budget, **how)
        play(world, gone, between, loser, besides)
    except Exception as error:
        traceback.print_exc()
        return raised(error)
    return ", ".join(world.wrong) or "right"


def played(*cases: str, besides: Collection[str] = ()) -> dict[str, dict[str, str]]:
    """What each case came to, with each scheduler."""
    found: dict[str, dict[str, str]] = real.with_each_scheduler(
        lambda mode, config: {case: outcome(mode, config, case, besides) for case in cases}
    )
    return found


def main() -> None:
    print_result(played(*CASES, *SEVERAL), vllm, lmcache)


if __name__ == "__main__":
    sys.modules["lmcache_within_step"] = sys.modules["__main__"]
    main()
