"""LMCache in the engine's process: requests that are aborted, lookups that time out, and an LMCache that did not start.

Run by a fresh interpreter with the releases' sources, and the bundle or not, on PYTHONPATH. The scheduler, vLLM's
LMCacheConnectorV1, LMCache's connector, manager, lookup client and server, engine and memory are the releases' own, made
by their own constructors. Stood in for are the copies between vLLM's KV cache and LMCache's memory (`Copies`), the
group of workers, and the model. Slots have contents: a number for the tokens up to each one's own. One JSON object.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import begin_driver, leave, outcome_of, print_result

begin_driver()

import gc
import inspect
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import native_double

native_double.stand_in()

import lmcache

native_double.device_ops(lmcache)
import real_scheduler as real
import torch
import vllm
from lmcache.integration.vllm import utils as lmcache_utils
from lmcache.integration.vllm import vllm_v1_adapter as adapter
from lmcache.v1 import gpu_connector, manager
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
from vllm.v1.core.sched.scheduler import Scheduler
from worlds import RIGHT, WRONG, Serving, Work

gc.enable()
gc.freeze()  # LMCache collects where it starts and ends, for seconds with all modules' objects

ANSWER = 6
BLOCK = real.BLOCK_SIZE
CHUNK = 2 * BLOCK
CHUNKS = 3
PROMPT = CHUNKS * CHUNK + 5
SECONDS = 60
"""How long another thread's work is awaited."""
WIDTH = 2 * 32
"""Numbers of a token in a layer: two heads of 32."""
HERE = ("vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector", "LMCacheConnectorV1")

GROUP = SimpleNamespace(
    broadcast=lambda tensor, src: tensor,
    broadcast_object=lambda found, src: found,
    rank_in_group=0,
    world_size=1,
    is_last_rank=True,
)
parallel_state.get_tp_group = lambda: GROUP
parallel_state.get_tensor_model_parallel_rank = lambda: 0
adapter.get_pp_group = lambda: GROUP
lmcache_utils.vllm_layout_hints = lambda *_: {}  # of the device's KV cache, for the connector that is stood in for
if hasattr(lmcache_utils, "get_vllm_torch_dev"):  # to 0.4.4, which knows devices of three kinds
    lmcache_utils.get_vllm_torch_dev = lambda: (SimpleNamespace(device_count=lambda: 1), "cpu")


class Copies:
    """In place of LMCache's GPU connector: copies tokens between vLLM's KV cache, on the CPU here, and LMCache's memory."""

    def __init__(self) -> None:
        self.kv: torch.Tensor = torch.empty(0)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, 1, num_tokens, WIDTH])

    def initialize_kvcaches_ptr(self, **_: Any) -> None: ...

    def batched_from_gpu(self, objects: Any, starts: Any, ends: Any, *, slot_mapping: Any, **_: Any) -> None:
        for stored, start, end in zip(objects, starts, ends, strict=True):
            memory(stored)[:, 0] = rows(self.kv)[:, slot_mapping[start:end]]

    def batched_to_gpu(self, objects: Any, starts: Any, ends: Any, *, slot_mapping: Any, **_: Any) -> None:
        for stored, start, end in zip(objects, starts, ends, strict=True):
            rows(self.kv)[:, slot_mapping[start:end]] = memory(stored)[:, 0]


def memory(stored: Any) -> torch.Tensor:
    """A chunk's memory, which LMCache's own copies need too. Raises RuntimeError where it was given to others."""
    if stored.tensor is None:
        raise RuntimeError("a chunk has no memory")
    return stored.tensor


def rows(kv: torch.Tensor) -> torch.Tensor:
    """A layer's KV cache by slot."""
    return kv.view(2, real.NUM_BLOCKS * BLOCK, WIDTH)


COPIES = Copies()
for module in (gpu_connector, adapter, manager):
    module.CreateGPUConnector = lambda *args, **kwargs: COPIES


class World(Serving):
    """A scheduler and a worker, LMCache on both sides, and what clients got."""

    def __init__(self, mode: str, model_config: Any, **config: Any) -> None:
        LMCacheEngineBuilder.destroy(lmcache_utils.ENGINE_NAME)
        given = {
            "chunk_size": CHUNK,
            "max_local_cpu_size": 0.02,
            "enable_async_loading": False,
            "lookup_timeout_ms": 1000 * SECONDS,
            "use_layerwise": False,
            "hit_miss_ratio": None,
            **config,
        }
        extra = {f"lmcache.{name}": value for name, value in given.items()}
        super().__init__(real.make_scheduler(mode, model_config, HERE, extra=extra))
        self.connector = self.scheduler.connector._lmcache_engine
        place = (self.scheduler.vllm_config, KVConnectorRole.WORKER)
        try:
            self.worker = LMCacheConnectorV1(*place, self.scheduler.kv_cache_config)
        except TypeError:  # older releases do not pass it
            self.worker = LMCacheConnectorV1(*place)
        self.kv = COPIES.kv = torch.zeros(2, real.NUM_BLOCKS, BLOCK, 2, WIDTH // 2)
        self.worker.register_kv_caches({"layer0": self.kv})
        self.engine = self.worker._lmcache_engine.lmcache_engine
        self.numbers: dict[Any, int] = {}
        self.taken: list[Any] = []
        self.loaded: dict[str, int] = {}
        self.left: set[str] = set()

    def add(self, name: str, like: str = "", prompt: int = PROMPT, parameters: Any = None) -> None:
        """A client comes; its prompt is its own, or begins with that of the request `like`. `parameters`: what it gave."""
        request = real.make_request(like or name, tokens=ANSWER, prompt=prompt)
        request.kv_transfer_params = parameters
        request.sampling_params.extra_args = {"kv_transfer_params": parameters}
        self.come(name, request)

    def hang_up(self, name: str) -> None:
        """Its client goes."""
        self.left.add(name)
        real.abort(self.scheduler, name)

    def fill(self) -> None:
        """Others take the whole pool."""
        self.taken = self.scheduler.kv_cache_manager.block_pool.get_new_blocks(real.free_blocks(self.scheduler))

    def make_room(self) -> None:
        self.scheduler.kv_cache_manager.block_pool.free_blocks(self.taken)
        self.taken = []

    def number(self, content: Any) -> int:
        """What stands for a content in a slot; 0 is what an empty slot has."""
        return self.numbers.setdefault(content, len(self.numbers) + 1)

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        work = self.work_of(scheduled)
        for request in scheduled.kv_connector_metadata.requests:
            if request.load_spec is not None and request.load_spec.can_load:
                self.loaded[request.req_id] = request.load_spec.lmcache_cached_tokens
        self.unanswered.append((pickle.dumps(scheduled.kv_connector_metadata), scheduled, work))
        if len(self.unanswered) > self.ahead:
            self.answer(*self.unanswered.popleft())

    def answer(self, metadata: bytes, scheduled: Any, work: list[Work]) -> None:
        output = real.run_model(scheduled)
        self.worker.bind_connector_metadata(pickle.loads(metadata))
        self.worker.start_load_kv(SimpleNamespace(attn_metadata=object() if work else None, no_compile_layers={}))
        for index, (name, (table,), start, end, samples) in enumerate(work):
            right = self.compute(name, table, start, end)
            output.sampled_token_ids[index] = [RIGHT if right else WRONG] if samples else []
        if work:
            self.worker.wait_for_layer_load("layer0")
            self.worker.save_kv_layer("layer0", self.kv, object())
            self.worker.wait_for_save()
        sent, received = self.worker.get_finished(scheduled.finished_req_ids)
        transfers = real.transfers(received or (), sent or ())
        transfers.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
        self.worker.clear_connector_metadata()
        output.kv_connector_output = transfers
        self.deliver(scheduled, output)

    def compute(self, name: str, table: list[int], start: int, end: int) -> bool:
        """Whether all that a request computes on is its own."""
        slots = rows(self.kv)
        places = [table[place // BLOCK] * BLOCK + place % BLOCK for place in range(end)]
        numbers = [self.number(self.content(name, place)) for place in range(end)]
        right = slots[0, places[:start], 0].tolist() == numbers[:start]
        for place, number in zip(places[start:], numbers[start:], strict=True):
            slots[:, place] = number if right else 0
        return right

    def until(self, true: Callable[[], object], what: str, act: Callable[[], object] = lambda: None) -> None:
        """Await another thread's work."""
        end = time.monotonic() + SECONDS
        while not true():
            if not self.expect(time.monotonic() < end, f"never: {what}"):
                return
            act()
            time.sleep(0.002)

    def preempt(self) -> None:
        """Everybody who runs is preempted, when no step is under way."""
        while self.unanswered:
            self.answer(*self.unanswered.popleft())
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def settle(self) -> None:
        """Serve until all have ended, the lookups that are under way included."""
        self.until(lambda: not self.scheduler.requests, "all requests end", self.step)
        self.steps(3)

    def held(self) -> list[Any]:
        """LMCache's memory that cannot be given to others, or that nobody reads any more and somebody holds."""
        hot = self.engine.storage_manager.storage_backends["LocalCPUBackend"].hot_cache
        return [one for one in hot.values() if one.is_pinned or one.get_ref_count() != 1]

    def stored(self, name: str) -> int:
        """How many of a prompt's tokens LMCache has."""
        return int(self.engine.lookup(tokens=self.prompts[name], lookup_id="asked", pin=False))

    def judge(self) -> str:
        """What is wrong in the end. What LMCache has of each prompt is loaded once more, and answered with."""
        for name, tokens in self.clients.items():
            self.expect(WRONG not in tokens, f"{name} got a wrong token")
            self.expect(name in self.left or len(tokens) == ANSWER, f"{name} got another answer")
        self.expect_full_pool()
        return ", ".join(self.wrong) or "right"


def well(world: World, name: str = "last") -> None:
    """LMCache goes on: what is stored of the first prompt is loaded, and leaves nothing held."""
    world.settle()
    world.forget()
    world.add(name, like="first")
    world.settle()
    world.expect(world.loaded.get(name) == CHUNKS * CHUNK, f"{name} loads nothing")
    for number in range(
        3
    ):  # LMCache's asynchronous client gives back at its next lookup, and the workers do before they answer it
        world.add(f"{name} {number}")
        world.settle()
    world.expect(not world.held(), "what was looked up is never given back")
    connector = world.connector
    kept = {**connector.load_specs, **connector._unfinished_requests, **connector._request_trackers}
    world.expect(not kept, f"kept of requests that ended: {sorted(kept)}")


def stored(world: World) -> None:
    """A prompt is stored, and the prefix cache has lost it."""
    world.add("first")
    world.settle()
    world.expect(world.stored("first") == CHUNKS * CHUNK, "first stores nothing")
    world.forget()


def undisturbed(world: World) -> None:
    """A prompt is stored, and loaded."""
    stored(world)
    well(world)


def again(world: World) -> None:
    """A prompt is loaded three times, others' are stored between; then two with it load in one step."""
    stored(world)
    for number in range(3):
        world.forget()
        world.add(f"again {number}", like="first")
        world.add(f"other {number}")
        world.settle()
        world.expect(world.loaded.get(f"again {number}") == CHUNKS * CHUNK, f"{number} loads nothing")
    world.forget()
    for number in range(2):
        world.add(f"pair {number}", like="first")
    world.settle()
    well(world)


def partly(world: World) -> None:
    """The prefix cache has the first chunk: LMCache prefetches all of them, and copies the rest. Then all are copied."""
    stored(world)
    for number in range(2):
        world.add(f"before {number}", like="first", prompt=CHUNK + 3)
        world.settle()
        world.add(f"partly {number}", like="first")
        world.settle()
        world.expect(world.loaded.get(f"partly {number}") == CHUNKS * CHUNK, f"partly {number} loads nothing")
        world.forget()
    well(world)


def queued(world: World) -> None:
    """The client goes while its request waits for blocks; LMCache was asked, and holds what it found."""
    stored(world)
    world.fill()
    world.add("gone", like="first")
    world.until(lambda: "gone" in world.connector.load_specs, "gone is looked up", world.step)
    world.expect(world.held(), "nothing is held for who waits")
    world.hang_up("gone")
    world.steps(3)
    world.make_room()
    well(world)


def queued_again(world: World) -> None:
    """Another comes at once with the id of one that went while it waited."""
    stored(world)
    world.fill()
    world.add("gone", like="first")
    world.until(lambda: "gone" in world.connector.load_specs, "gone is looked up", world.step)
    world.hang_up("gone")
    world.add("gone", like="first")
    world.left.discard("gone")
    world.step()
    world.make_room()
    well(world)


def queued_again_and_preempted(world: World) -> None:
    """Another comes at once with the id of one that went while it waited, runs, and is preempted."""
    stored(world)
    world.fill()
    world.add("gone", like="first")
    world.until(lambda: "gone" in world.connector.load_specs, "gone is looked up", world.step)
    world.hang_up("gone")
    world.make_room()
    world.add("gone", like="first")
    world.left.discard("gone")
    world.step()
    world.preempt()
    well(world)


UNREADABLE: list[Any] = [
    {"disagg_spec": {}},
    {"disagg_spec": None},
    {"disagg_spec": {"req_id": "", "receiver_host": 1, "receiver_init_port": [1], "receiver_alloc_port": [1]}},
    {"lmcache.tag.one": {}},
    {"lmcache.tag.one": []},
    5,
    "disagg_spec",
    ["ret_first_tok"],
]
"""`kv_transfer_params`, of which anything but an object comes by way of `vllm_xargs`."""
if "kv_transfer_params.get(" in inspect.getsource(inspect.unwrap(Scheduler.add_request)):
    # From 0.33.0 the scheduler itself reads them first, and raises.
    UNREADABLE = [given for given in UNREADABLE if isinstance(given, dict)]


def unreadable(world: World) -> None:
    """Clients give parameters that LMCache cannot read. What it can, it reads."""
    stored(world)
    for number, parameters in enumerate(UNREADABLE):
        world.add(f"odd {number}", parameters=parameters)
        world.settle()
    world.add("tagged", like="first", parameters={"lmcache.tag.one": "1"})
    world.settle()
    world.expect("tagged" not in world.loaded, "tagged loads what has no tag")
    well(world)


def no_token(world: World) -> None:
    """Clients ask for their first token apart, or for what LMCache cannot read, and go before there is one."""
    stored(world)
    world.fill()
    world.add("gone", parameters={"ret_first_tok": True})
    world.add("odd", parameters=UNREADABLE[-1])
    world.steps(2)
    world.hang_up("gone")
    world.hang_up("odd")
    world.make_room()
    well(world)


def loading(world: World) -> None:
    """The client goes when its load was scheduled; where steps overlap, before the worker loads."""
    stored(world)
    world.add("gone", like="first")
    world.until(lambda: "gone" in world.loaded, "gone loads", world.step)
    world.hang_up("gone")
    well(world)


def running(world: World) -> None:
    """The client goes while its request computes, alone and beside others; another prompt's was stored in part."""
    stored(world)
    world.add("gone")
    world.add("beside", like="first")
    world.until(lambda: world.clients["gone"], "gone runs", world.step)
    world.hang_up("gone")
    world.settle()
    world.forget()
    world.add("later", like="gone")
    world.settle()
    well(world)


def waiting_for_nothing(world: World) -> None:
    """The client goes before LMCache is asked."""
    stored(world)
    world.add("gone", like="first")
    world.hang_up("gone")
    well(world)


def hold_answers(world: World, milliseconds: int = 1000 * SECONDS) -> Callable[[], None]:
    """Let the worker's lookup server keep its answers; what lets go of them, and of later ones at once.

    Until then lookups are given up after so many milliseconds.
    """
    world.connector.config.lookup_timeout_ms = milliseconds
    server = world.worker._lmcache_engine.lookup_server
    send, kept = server.send_response_to_scheduler, []
    server.send_response_to_scheduler = lambda *args, **kwargs: kept.append((args, kwargs))

    def let_go() -> None:
        world.until(lambda: kept, "the worker looks up")
        world.connector.config.lookup_timeout_ms = 1000 * SECONDS
        server.send_response_to_scheduler = send
        for args, kwargs in kept:
            send(*args, **kwargs)

    return let_go


def pending(world: World) -> None:
    """The client goes while the worker looks up."""
    stored(world)
    let_go = hold_answers(world)
    world.add("gone", like="first")
    world.steps(2)
    world.hang_up("gone")
    world.steps(2)
    let_go()
    well(world)


def timed_out(world: World, gone: bool = False) -> None:
    """A lookup times out while its request waits for blocks. It is asked for again, and answered late."""
    stored(world)
    let_go = hold_answers(world, milliseconds=20)
    world.fill()
    world.add("late", like="first")
    world.until(lambda: "late" in world.connector.load_specs, "late is given up", world.step)
    world.steps(3)
    if gone:
        world.hang_up("late")
        world.steps(2)
    world.make_room()
    world.steps(3)
    let_go()
    world.settle()
    world.expect("late" not in world.loaded, "late loads what was given up")
    well(world)


def timed_out_and_gone(world: World) -> None:
    """A lookup times out, and its client goes before the workers answer."""
    timed_out(world, gone=True)


def timed_out_and_answered(world: World) -> None:
    """A lookup that timed out is answered while its request still waits for blocks: it is asked for anew, and loads."""
    stored(world)
    let_go = hold_answers(world, milliseconds=20)
    world.fill()
    world.add("late", like="first")
    world.until(lambda: "late" in world.connector.load_specs, "late is given up", world.step)
    world.step()
    let_go()
    late = world.connector.load_specs
    world.until(lambda: late["late"].lmcache_cached_tokens, "late is answered", world.step)
    world.make_room()
    world.settle()
    world.expect(world.loaded.get("late") == CHUNKS * CHUNK, "late loads nothing")
    well(world)


def degraded(world: World) -> None:
    """LMCache did not start: prompts are computed here, some clients go, and nothing is stored."""
    world.expect(world.connector.lookup_client is None, "LMCache has started")
    world.add("first")
    world.add("gone")
    world.until(lambda: world.clients["gone"], "gone runs", world.step)
    world.hang_up("gone")
    world.settle()
    world.forget()
    world.add("last", like="first")
    world.settle()
    world.expect(not world.loaded, "something is loaded")


Case = tuple[Callable[[World], None], dict[str, Any]]
ASYNC = {"enable_async_loading": True}
CASES: dict[str, Case] = {
    "undisturbed": (undisturbed, {}),
    "waiting": (waiting_for_nothing, {}),
    "queued": (queued, {}),
    "queued_again": (queued_again, {}),
    "queued_again_and_preempted": (queued_again_and_preempted, {}),
    "unreadable": (unreadable, {}),
    "no_token": (no_token, {}),
    "loading": (loading, {}),
    "running": (running, {}),
    "again": (again, {}),
    "partly": (partly, {}),
    "async_undisturbed": (undisturbed, ASYNC),
    "async_again": (again, ASYNC),
    "async_partly": (partly, ASYNC),
    "async_queued": (queued, ASYNC),
    "async_queued_again": (queued_again, ASYNC),
    "async_queued_again_and_preempted": (queued_again_and_preempted, ASYNC),
    "async_unreadable": (unreadable, ASYNC),
    "async_loading": (loading, ASYNC),
    "async_running": (running, ASYNC),
    "async_pending": (pending, ASYNC),
    "async_limited": (pending, {**ASYNC, "hit_miss_ratio": 0.0}),
    "timed_out": (timed_out, ASYNC),
    "timed_out_and_gone": (timed_out_and_gone, ASYNC),
    "timed_out_and_answered": (timed_out_and_answered, ASYNC),
}
DEGRADED: dict[str, Case] = {
    "degraded": (degraded, {}),
    "degraded_by_layer": (degraded, {"use_layerwise": True}),
    "degraded_async": (degraded, ASYNC),
}


def outcome(mode: str, model_config: Any, case: Case) -> str:
    play, config = case

    def run() -> str:
        world = World(mode, model_config, **config)
        play(world)
        return world.judge()

    return outcome_of(run)


def played(wanted: Iterable[str] = ()) -> dict[str, dict[str, str]]:
    """What each case came to with each scheduler; all cases, or those that are wanted."""
    wanted = [*wanted] or [*CASES, *DEGRADED]
    # The paths of sockets hold at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="i", dir="/tmp") as place:
        os.environ["VLLM_RPC_BASE_PATH"] = place
        found = real.with_each_scheduler(
            lambda mode, config: {name: outcome(mode, config, case) for name, case in CASES.items() if name in wanted}
        )
        os.environ["VLLM_RPC_BASE_PATH"] = f"{place}/{'p' * 107}"
        late = real.with_each_scheduler(
            lambda mode, config: {
                name: outcome(mode, config, case) for name, case in DEGRADED.items() if name in wanted
            }
        )
    return {mode: {**found[mode], **late[mode]} for mode in found}


def main() -> None:
    print_result(played(sys.argv[1:]), vllm, lmcache)
    leave()


if __name__ == "__main__":
    main()
