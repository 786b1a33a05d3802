# mypy: disable-error-code="import-not-found"
"""Drive one release's scheduler, MoRI-IO connector and worker through reads that are late, fail or are given up.

Run with the release's sources and the stand-in for mori, and the bundle or not, on the path; the first argument is how
many seconds a peer that never answers is waited for, `own_error` behind it another case. All is the release's own but the transfers and the model. What a request's slots hold
follows from its tokens, and the model's double reads them: it samples RIGHT where every slot before its own holds what
its tokens say, else WRONG. Prints as JSON what came of each case's requests.
"""

from __future__ import annotations

from result import NotBuilt, begin_driver, does_not_fit, leave, print_result, raised, trouble

begin_driver()

import functools
import gc
import inspect
import itertools
import os
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import real_scheduler as engine
import torch
import vllm
from mori import orders
from moriio_worker import HOST, LAYERS, Peer, Sent, caches, set_up, until
from ports import free_port
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as runner

gc.freeze()
gc.enable()

seconds_of_silence = 0.0
"""How long a step may take whose peer is silent: `played` is told."""
LONG = 60.0
"""For what nothing is in the way of, on a machine that is busy otherwise."""
BLOCKS, BLOCK_SIZE = 8, 4  # the worker's caches; block 0 is the pool's null block
RIGHT, WRONG, STOP = 7, 8, 9
STEPS = 200
"""No case needs more than a dozen; the peer that is waited for answers within milliseconds."""


class Died(Exception):
    """The engine core would have ended here."""


class World:
    """A decode engine of one release, and a peer to read from."""

    def __init__(
        self,
        scheduler: str,
        policy: str,
        model: Any,
        blocks: int = BLOCKS,
        prefill: bool = False,
        write: bool | None = None,
    ) -> None:
        read = not (prefill if write is None else write)
        orders.let(orders.AT_ONCE)
        os.environ["VLLM_MORIIO_CONNECTOR_READ_MODE"] = str(int(read))
        ports = {"handshake_port": free_port(), "notify_port": free_port(), "http_port": 0, "proxy_ping_port": 0}
        config = VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=64,
                max_model_len=64,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                disable_hybrid_kv_cache_manager=True,
                async_scheduling=scheduler == "AsyncScheduler",
            ),
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(
                kv_connector="MoRIIOConnector",
                kv_role="kv_producer" if prefill else "kv_consumer",
                kv_load_failure_policy=policy,
                kv_connector_extra_config={"proxy_ip": "", "read_mode": read, **ports},
            ),
            device_config=DeviceConfig(device="cpu"),
        )
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=8, dtype=torch.float32)
        kv_cache_config = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)]
        )
        self.pool = blocks
        init_none_hash(sha256)
        self.scheduler = engine.SCHEDULERS[scheduler](
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        create = KVConnectorFactory.create_connector
        knows_caches = "kv_cache_config" in inspect.signature(create).parameters
        given = (config, KVConnectorRole.WORKER, kv_cache_config) if knows_caches else (config, KVConnectorRole.WORKER)
        self.connector = create(*given)
        self.caches = self.empty_caches(spec)
        self.connector.register_kv_caches(self.caches)
        runner.get_kv_transfer_group = lambda: self.connector
        runner.get_forward_context = lambda: None
        self.handshake_port, self.notify_port = int(ports["handshake_port"]), int(ports["notify_port"])
        self.sampled = RIGHT
        self.ahead = 1 if scheduler == "AsyncScheduler" else 0
        self.queue: deque[tuple[Any, Any]] = deque()
        self.tokens: dict[str, list[int]] = {}  # what clients have got
        self.ends: dict[str, str] = {}
        self.peers: list[Peer] = []

    def empty_caches(self, spec: Any) -> dict[str, Any]:
        """The worker's caches, in the release's layout."""
        return caches(0.0)

    def slot(self, cache: Any, block: int, at: int) -> Any:
        """Where a layer's cache has a token's KV."""
        return cache[:, block, at]

    def peer(self, answers: str = "yes") -> Peer:
        self.peers.append(Peer(answers))
        return self.peers[-1]

    def add(self, peer: Peer | None, prompt: list[int], remote: list[int], tokens: int = 2) -> str:
        """A request whose prompt's KV the peer has, in its blocks `remote`; without a peer, one of this engine only."""
        parameters: dict[str, Any] | None = None
        named = f"cmpl-local-{len(self.tokens)}"
        if peer is not None:
            sent = Sent(peer, [], remote)
            named = sent.request_id
            parameters = {**sent.parameters, "do_remote_prefill": True, "do_remote_decode": False}
            for at, token in enumerate(prompt):
                for layer, cache in enumerate(peer.caches.values()):
                    cache[:, remote[at // BLOCK_SIZE], at % BLOCK_SIZE] = content(layer, token, at)
        return self.submit(named, prompt, parameters, tokens)

    def submit(
        self, named: str, prompt: list[int], parameters: dict[str, Any] | None, tokens: int, stop: Iterable[int] = ()
    ) -> str:
        extra = {"kv_transfer_params": parameters} if parameters else None
        request = Request(
            request_id=named,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                max_tokens=tokens, ignore_eos=True, extra_args=extra, stop_token_ids=list(stop)
            ),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
            **engine.end_token_named_per_request(),
        )
        self.tokens[named] = []
        self.scheduler.add_request(request)
        return named

    def send(self, peer: Peer, prompt: list[int], remote: list[int], stop: Iterable[int] = ()) -> str:
        """A request whose KV is to be written to the peer, which has said that it has the blocks `remote` for it."""
        sent = Sent(peer, [], remote)
        worker: Any = SimpleNamespace(notify_port=self.notify_port, real=self.connector.connector_worker)
        sent.allocate(worker)
        parameters = {**sent.parameters, "do_remote_decode": True, "do_remote_prefill": False}
        return self.submit(sent.request_id, prompt, parameters, 1, stop)

    def step(self) -> None:
        """One step of the engine core; with async scheduling the next step is scheduled before this one's output."""
        try:
            scheduled = self.scheduler.schedule()
            placed = {name: self.blocks_of(name) for name in scheduled.num_scheduled_tokens}
            self.queue.append((scheduled, self.execute(scheduled, placed)))
            while len(self.queue) > self.ahead:
                self.finish_step()
        except Exception as error:
            raised(error)  # which raises where it is this driver that does not fit
            raise Died(f"{type(error).__name__}: {error}") from error

    def finish_step(self) -> None:
        scheduled, output = self.queue.popleft()
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for part in outputs.outputs:
                self.tokens[part.request_id] += part.new_token_ids
                if part.finish_reason is not None:
                    self.ends[part.request_id] = str(part.finish_reason)

    def blocks_of(self, request_id: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    def execute(self, scheduled: Any, placed: dict[str, list[int]]) -> Any:
        """The worker's part: the connector's as the release's own runner calls it, and the model's double."""
        starts = engine.computed_before(scheduled)
        sampled: dict[str, list[int]] = {}
        with runner.KVConnectorModelRunnerMixin._get_kv_connector_output(scheduled) as transferred:
            for name, number in scheduled.num_scheduled_tokens.items():
                sampled[name] = self.compute(name, placed[name], starts[name], number)
            for name, cache in self.caches.items() if sampled else ():
                self.connector.save_kv_layer(name, cache, None)
        output = engine.run_model(scheduled)
        output.sampled_token_ids = [sampled[name] for name in output.req_ids]
        output.kv_connector_output = transferred
        return output

    def compute(self, name: str, blocks: list[int], start: int, number: int) -> list[int]:
        """Read the slots before `start`, write the next `number`; a token where the prompt's end was reached."""
        request = self.scheduler.requests.get(name)
        if request is None:  # aborted since it was scheduled
            return [WRONG]
        tokens = [*request.prompt_token_ids, *[RIGHT] * 64]
        right = True
        for layer, cache in enumerate(self.caches.values()):
            for at in range(start + number):
                slot = self.slot(cache, blocks[at // BLOCK_SIZE], at % BLOCK_SIZE)
                if at < start:
                    right = right and bool((slot == content(layer, tokens[at], at)).all())
                else:
                    slot[:] = content(layer, tokens[at], at)
        if start + number < request.num_prompt_tokens:
            return []
        return [self.sampled if right else WRONG]

    def run(self, names: Iterable[str]) -> None:
        """Step until these requests have ended for their clients."""
        wanted = set(names)
        for _ in range(STEPS):
            if wanted <= set(self.ends):
                return
            self.step()

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def abort(self, name: str) -> None:
        self.ends[name] = "aborted"
        engine.abort(self.scheduler, name)

    def outcome(self, name: str) -> str:
        """What the client of a request got."""
        if WRONG in self.tokens[name]:
            return "wrong"
        end = self.ends.get(name, "waits")
        return "right" if end == "length" else end

    def kept(self) -> int:
        """Blocks that are still held, and ids that are still known, once nothing has anything left to do."""
        self.steps(4)
        return self.pool - 1 - int(engine.free_blocks(self.scheduler)) + len(self.scheduler.requests)

    def close(self) -> None:
        worker = self.connector.connector_worker
        for flags in (worker.write_ready_flags, worker.load_ready_flag):  # what a stock worker still spins for
            flags.update(dict.fromkeys([None, *(peer.address for peer in self.peers)], True))
        worker._handshake_initiation_executor.shutdown(wait=False)


def content(layer: int, token: int, at: int) -> float:
    """What the KV of a token at a place is, in a layer; exact in 32 bits, and never the 0 of an unused slot."""
    return float(token * 10_000 + at * 10 + layer + 1)


_firsts = itertools.count(100)


def prompt(length: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    first = next(_firsts)
    return [first, *range(20, 19 + length)]


def healthy(world: World) -> str:
    """Three requests of lengths that end within a block, at its end and one after it; the second one twice."""
    peer = world.peer()
    again = prompt(8)
    seen = []
    for tokens in (prompt(7), again, prompt(9), again):
        name = world.add(peer, tokens, [5, 3, 4][: -(-len(tokens) // BLOCK_SIZE)])
        world.run([name])
        seen.append(world.outcome(name))
    return ended(world, seen)


def ended(world: World, seen: list[str]) -> str:
    kept = world.kept()
    return ", ".join(dict.fromkeys(seen)) + (f"; {kept} kept" if kept else "")


def one(world: World, answers: str = "yes") -> str:
    """A request, then one to a peer that answers and reads at once."""
    first = world.add(world.peer(answers), prompt(11), [1, 2, 3])
    world.run([first])
    orders.let(orders.AT_ONCE)
    second = world.add(world.peer(), prompt(11), [1, 2, 3])
    world.run([second])
    return ended(world, [f"{world.outcome(first)}, next {world.outcome(second)}"])


def late(world: World) -> str:
    """The read takes some steps."""
    orders.let(orders.LATE)
    name = world.add(world.peer(), prompt(11), [1, 2, 3])
    world.steps(5)
    orders.release()
    world.run([name])
    return ended(world, [world.outcome(name)])


def earlier_layer_late(world: World) -> str:
    """The last layer is there at once, the one before it some steps later."""
    orders.let(lambda number: orders.LATE if number % 2 == 0 else orders.AT_ONCE)
    peer = world.peer()
    name = world.add(peer, prompt(11), [1, 2, 3])
    world.steps(5)
    too_early = until(lambda: name in peer.notified, 1.0)
    orders.release()
    world.run([name])
    until(lambda: name in peer.notified, 10)
    return ended(world, [world.outcome(name)]) + "; peer told too early" * too_early


def fails(world: World) -> str:
    """One layer's read fails."""
    orders.let(lambda number: orders.FAILED if number == 0 else orders.AT_ONCE)
    return one(world)


def fails_while_pending(world: World) -> str:
    """One layer fails, the other is pending for some steps more; the pool has room for one request only."""
    orders.let(lambda number: orders.FAILED if number == 0 else orders.LATE)
    first = world.add(world.peer(), prompt(11), [1, 2, 3])
    world.steps(5)
    early = first in world.ends
    orders.let(orders.AT_ONCE)
    second = world.add(None, prompt(11), [])
    world.steps(2)
    orders.release()
    world.run([first, second])
    return ended(world, [f"{world.outcome(first)}, next {world.outcome(second)}"]) + "; ended early" * early


def refused(world: World) -> str:
    """The second layer's read cannot be begun."""
    orders.let(lambda number: orders.REFUSED if number == 1 else orders.AT_ONCE)
    return one(world)


def silent(world: World) -> str:
    """The peer never answers the handshake."""
    return one(world, "no")


def garbage(world: World) -> str:
    """The peer answers the handshake with something else."""
    return one(world, "garbage")


def aborted(world: World) -> str:
    """The client goes while the read is under way; the next request needs the same blocks."""
    orders.let(orders.LATE)
    first = world.add(world.peer(), prompt(11), [1, 2, 3])
    world.steps(2)
    world.abort(first)
    orders.let(orders.AT_ONCE)
    second = world.add(None, prompt(15), [], tokens=6)
    world.steps(3)
    orders.release()
    world.run([second])
    return ended(world, [world.outcome(second)])


def never_ends(world: World) -> str:
    """A read that never ends: its request waits, its blocks stay, another request is served."""
    orders.let(orders.NEVER)
    first = world.add(world.peer(), prompt(7), [1, 2])
    world.steps(2)
    threading.Event().wait(0.4)  # longer than TRANSFER_SECONDS
    orders.let(orders.AT_ONCE)
    second = world.add(world.peer(), prompt(7), [1, 2])
    world.run([second])
    seen = [f"{world.outcome(first)}, next {world.outcome(second)}"]
    world.abort(first)
    return ended(world, seen)


def shares_a_block(world: World) -> str:
    """A read fails of a request whose first block is here already, and in use by another one."""
    peer = world.peer()
    tokens = prompt(8)
    first = world.add(peer, tokens, [5, 3], tokens=8)
    while not world.tokens[first]:
        world.step()
    orders.let(orders.FAILED)
    second = world.add(peer, [*tokens[:BLOCK_SIZE], *prompt(4)], [4, 6])
    world.run([first, second])
    return ended(world, [f"{world.outcome(first)}, next {world.outcome(second)}"])


def preempted(world: World) -> str:
    """Preempted after its first token; the KV is not read again."""
    name = world.add(world.peer(), prompt(11), [1, 2, 3], tokens=4)
    while not world.tokens[name]:
        world.step()
    while world.queue:
        world.finish_step()
    world.scheduler.reset_prefix_cache(reset_running_requests=True)
    for cache in world.caches.values():
        cache.zero_()  # as if its blocks had been others' meanwhile
    world.run([name])
    return ended(world, [world.outcome(name)])


def local(world: World) -> str:
    """A request that no router sent: nothing will be read for it."""
    name = world.add(None, prompt(11), [])
    world.run([name])
    return ended(world, [world.outcome(name)])


def aborted_before(world: World) -> str:
    """Aborted before it was scheduled: the peer hears that it may have its blocks back."""
    peer = world.peer()
    first = world.add(peer, prompt(11), [1, 2, 3])
    world.abort(first)
    second = world.add(peer, prompt(11), [4, 5, 6])
    world.run([second])
    heard = until(lambda: first in peer.notified, 10)
    return ended(world, [world.outcome(second)]) + "; peer never told" * (not heard)


def stopped(world: World) -> str:
    """A prefill's request ends by a stop token while it is written to its peer; the next one needs its blocks."""
    orders.let(orders.LATE)
    peer = world.peer()
    tokens, remote = prompt(11), [1, 2, 3]
    first = world.send(peer, tokens, remote, stop=[STOP])
    world.sampled = STOP
    world.run([first])
    until(lambda: orders.begun() == len(LAYERS), 10)
    second = world.send(peer, prompt(15), [4, 5, 6, 7])
    world.steps(3)
    orders.release()
    orders.let(orders.AT_ONCE)
    until(lambda: world.connector.connector_worker.moriio_wrapper.done_req_ids, 10)
    for layer, cache in enumerate(peer.caches.values()):
        for at, token in enumerate(tokens):
            if not (cache[:, remote[at // BLOCK_SIZE], at % BLOCK_SIZE] == content(layer, token, at)).all():
                return "KV of another request sent"
    world.run([second])
    until(lambda: world.connector.connector_worker.moriio_wrapper.done_req_ids, 10)
    return ended(world, [world.outcome(second)])


def own_error(world: World) -> str:
    """The patch errs while a read is under way: that is still reported, and the next prompt is computed here."""
    peer = world.peer()
    orders.let(orders.LATE)
    first = world.add(peer, prompt(11), [1, 2, 3])
    world.steps(2)
    second = world.add(peer, prompt(11), [4, 5, 6])
    parameters = world.scheduler.requests[second].kv_transfer_params
    world.scheduler.requests[second].kv_transfer_params = Unreadable(parameters)
    world.run([second])
    third = world.add(peer, prompt(7), [4, 5])
    world.run([third])
    orders.release()
    world.run([first])
    return ended(world, [world.outcome(name) for name in (first, second, third)])


class Unreadable(dict[str, Any]):
    """Parameters that cannot be asked for what the release's own code does not ask for at that time."""

    asked = False

    def get(self, name: str, default: Any = None) -> Any:
        if name == "do_remote_prefill" and not self.asked:
            self.asked = True
            raise RuntimeError("the test's own error")
        return super().get(name, default)


CASES: dict[str, tuple[Callable[[World], str], dict[str, Any]]] = {
    "healthy": (healthy, {}),
    "late": (late, {}),
    "earlier_layer_late": (earlier_layer_late, {}),
    "fails": (fails, {}),
    "fails_while_pending": (fails_while_pending, {"blocks": 6}),
    "refused": (refused, {}),
    "garbage": (garbage, {}),
    "silent": (silent, {}),
    "aborted": (aborted, {"blocks": 7}),
    "never_ends": (never_ends, {}),
    "shares_a_block": (shares_a_block, {}),
    "preempted": (preempted, {}),
    "local": (local, {}),
    "aborted_before": (aborted_before, {}),
    "stopped": (stopped, {"blocks": 7, "prefill": True}),
}
OWN_ERROR = {"own_error": (own_error, {})}
"""Once, in a process of its own: the patch stands aside from then on."""


def drive(case: Callable[[World], str], world: World) -> str:
    """What came of a case, in a thread of its own: a stock worker may never come back."""
    seen: list[str] = []
    misfits: list[BaseException] = []

    def run() -> None:
        try:
            seen.append(case(world))
        except Died as error:
            print(f"  {error}", file=sys.stderr)
            seen.append("engine dies")
        except BaseException as error:
            misfits.extend([error] if does_not_fit(error) else [])
            seen.append(f"{type(error).__name__}: {error}")
            raise

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds_of_silence if case is silent else LONG)
    answer = seen[0] if seen else "never returns"
    for error in misfits:
        raise NotBuilt(trouble(error)) from error
    world.close()
    thread.join(LONG)  # what spun is released: it is not to meet the next case
    return answer


Cases = dict[str, tuple[Callable[[World], str], dict[str, Any]]]


def played(
    model: Any, scheduler: str, policy: str, seconds: float, cases: Cases = CASES
) -> dict[str, Callable[[], str]]:
    """The cases by their names, each on an engine of its own with this scheduler and policy: what it came to."""
    global seconds_of_silence
    seconds_of_silence = seconds
    make = functools.partial(World, scheduler, policy, model)
    return {name: functools.partial(_play, case, make, options) for name, (case, options) in cases.items()}


def _play(case: Callable[[World], str], make: Callable[..., World], options: dict[str, Any]) -> str:
    return drive(case, make(**options))


def begin() -> None:
    """Tell the release's modules of this machine."""
    engine.quiet()
    set_up()


def main() -> None:
    begin()
    outcomes: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = engine.make_model_config(Path(directory))
        cases, ways = CASES, [*itertools.product(engine.SCHEDULERS, ("fail", "recompute"))]
        if "own_error" in sys.argv:
            cases, ways = OWN_ERROR, ways[:1]
        for scheduler, policy in ways:
            found = outcomes.setdefault(f"{scheduler}, {policy}", {})
            for name, case in played(model, scheduler, policy, float(sys.argv[1]), cases).items():
                found[name] = case()
                print(f"{scheduler}, {policy}, {name}: {found[name]}", file=sys.stderr)
    print_result({"host": HOST, "cases": outcomes}, vllm)
    leave()


if __name__ == "__main__":
    main()
