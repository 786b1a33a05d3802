"""Read a release's KV blocks from one real NIXL worker by another, under leases that hold and leases that end.

Run with NIXL, the release's sources, and the bundle or not, on the path. Both workers are the release's own, with
agents of the real NIXL on CPU memory, and shake hands over the side channel; in one process, so that this script
decides in which order things happen. What their schedulers would tell them is told by it: which requests are in a
batch, until when a lease runs, what to read. Print one JSON object: of each case, whose contents arrived and what was reported.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import begin_driver, leave, print_result, until

begin_driver()

import contextlib
import functools
import gc
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import calm

calm.keep()

import torch
import vllm.platforms
from ports import free_port

if not hasattr(torch._C._cpu, "_is_avx512_supported"):
    torch._C._cpu._is_avx512_supported = lambda: False  # 0.17 asks for it by a name that later releases of torch lack
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()

PORT = free_port()
os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(PORT)

import nixl_agents
import real_scheduler as real
from nixl import _bindings as nixl_bindings
from nixl._api import nixl_agent
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

gc.enable()

BLOCKS = 23
"""Blocks of each worker, a number that is no other dimension of the cache."""
SECONDS = 60.0
READER, OTHER = 1.0, 1000.0
"""Contents: block b of the request that is read holds READER + b, and OTHER + b once it is given to another."""


def cache_shape() -> tuple[int, ...]:
    """The shape that the release's CPU backend gives a cache, with which its NIXL worker can deal."""
    # From 0.29 the layout is the configuration's, and K and V of a block lie together.
    shape_of = getattr(CPUAttentionBackend, "get_kv_cache_shape", lambda *_: (BLOCKS, 2, 32, 64))
    shape: tuple[int, ...] = shape_of(BLOCKS, 32, 2, 32)
    topology: Any = getattr(utils, "TransferTopology", None)
    if len(shape) == 4 and hasattr(topology, "split_k_and_v"):
        topology.split_k_and_v = False  # 0.23.0 to 0.25.1 take the CPU's cache for two, and cannot register it
    return shape


class Side:
    """One engine's half of the connector: its worker, and where asked for its side channel, and its cache."""

    CONNECTOR = "NixlConnector"

    def __init__(self, model_config: Any, *, guarded: bool = True) -> None:
        config = nixl_agents.make_config(model_config, self.CONNECTOR, {})
        # The port is both sides' own: only one of them listens on it at a time.
        spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        with set_current_vllm_config(config), plain(not guarded):
            self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
            self.worker = self.connector.connector_worker
            self.scheduler = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
            shape = cache_shape()
            self.cache = torch.zeros(shape)
            self.dimension = list(shape).index(BLOCKS)
            self.connector.register_kv_caches({"layer": self.cache})
        self.engine_id = self.worker.engine_id

    def listen(self) -> None:
        metadata = self.connector.get_handshake_metadata()
        if hasattr(self.scheduler, "set_xfer_handshake_metadata_pp_aware"):
            self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        else:
            self.scheduler.set_xfer_handshake_metadata({0: metadata})

    def deaf(self) -> None:
        self.scheduler.shutdown()

    def block(self, number: int) -> Any:
        return self.cache.select(self.dimension, number)

    def fill(self, blocks: Iterable[int], contents: float) -> None:
        for number in blocks:
            self.block(number).fill_(contents + number)

    def step(self, **parameters: Any) -> None:
        """Begin a step in which the worker is told something."""
        metadata = self.metadata()
        for name, value in parameters.items():
            setattr(metadata, name, value)
        self.worker.start_load_kv(metadata)

    def metadata(self) -> Any:
        module = sys.modules[type(self.worker).__module__]
        return module.NixlConnectorMetadata()

    def ended(self) -> tuple[set[str], set[str], set[str], set[int]]:
        """End a step: what was sent, received, and failed by id or by blocks."""
        results = self.connector.get_transfer_results(set()) if BY_REQUEST else None
        if results is None:
            sent, received = self.connector.get_finished(set())
            failed: set[str] = set()
        else:
            sent, received, failed = results.finished_sending, results.finished_recving, results.failed_recving
        return sent or set(), received or set(), failed or set(), self.connector.get_block_ids_with_load_errors()


def plain(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """While a worker is made, its agent is one of stock's: an engine without the bundle."""
    if not wanted:
        return contextlib.nullcontext()
    return mock.patch.object(nixl_agent, "__init__", inspect.unwrap(nixl_agent.__init__))


class Story:
    """One prefill and one decode, and the requests between them."""

    def __init__(self, prefill: Side, decode: Side) -> None:
        self.prefill, self.decode = prefill, decode

    def prefilled(self, request_id: str, blocks: list[int], lease: float = 600.0) -> None:
        """Compute a request, end it, and begin its lease."""
        self.prefill.step(reqs_in_batch={request_id})
        self.prefill.fill(blocks, READER)
        self.prefill.ended()
        self.prefill.step(reqs_to_send={request_id: time.perf_counter() + lease})

    def expire(self, request_id: str, blocks: list[int]) -> None:
        """Let the lease end, and give the blocks to another request, which fills them."""
        self.prefill.worker._reqs_to_send[request_id] = time.perf_counter() - 1
        assert request_id in self.prefill.ended()[0]
        self.prefill.fill(blocks, OTHER)

    def begin(self, request_id: str, of: str, blocks: list[int]) -> None:
        """Decode is told to read a request's blocks into its own of the same numbers; it has begun afterwards."""
        metadata = self.decode.metadata()
        groups: Any = (blocks,) if GROUPS else blocks
        more = {"awaiting_kvs": True} if "awaiting_kvs" in RECEIVE else {}
        params = {
            "remote_block_ids": groups,
            "remote_engine_id": self.prefill.engine_id,
            "remote_request_id": of,
            "remote_host": "127.0.0.1",
            "remote_port": PORT,
            "tp_size": 1,
        }
        for number in blocks:
            self.decode.block(number).zero_()
        metadata.add_new_req_to_recv(request_id, groups, params, **more)
        self.decode.worker.start_load_kv(metadata)
        worker = self.decode.worker
        if self.prefill.engine_id not in worker._remote_agents:
            until(lambda: not worker._ready_requests.empty())
            self.decode.step()
        assert request_id in worker._recving_transfers, "the read was not begun"

    def received(self, request_id: str, blocks: list[int]) -> dict[str, Any]:
        """Wait for decode's word; whose contents it has, and whether it says that the load failed."""
        found: list[tuple[set[str], set[int]]] = []

        def notified() -> bool:
            _, received, failed, invalid = self.decode.ended()
            if request_id in received:
                found.append((failed, invalid))
            return bool(found)

        until(notified)
        ((failed, invalid),) = found
        values = {float(self.decode.block(number)[..., :].unique().item()) - number for number in blocks}
        contents = {READER: "its own", OTHER: "another's"}
        return {
            "contents": sorted(contents.get(value, "none") for value in values),
            "failed": request_id in failed if BY_REQUEST else bool(invalid),
            "invalid": sorted(invalid) == sorted(blocks) if invalid else None,
        }

    def was_notified(self, request_id: str) -> bool:
        """Whether prefill hears that its request was read."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            if request_id in self.prefill.ended()[0]:
                return True
        return False


def in_time(story: Story) -> dict[str, Any]:
    """The lease holds: prefill keeps the blocks until decode has said that it has read them, and not longer."""
    story.prefilled("p-in-time", [1, 2])
    story.begin("d-in-time", "p-in-time", [1, 2])
    result = story.received("d-in-time", [1, 2])
    return {**result, "was_notified": story.was_notified("p-in-time")}


def late(story: Story) -> dict[str, Any]:
    """The router brings the request after its lease has ended."""
    story.prefilled("p-late", [3, 4])
    story.expire("p-late", [3, 4])
    story.begin("d-late", "p-late", [3, 4])
    return story.received("d-late", [3, 4])


def stopped(story: Story) -> dict[str, Any]:
    """The lease ends while the read is under way, and decode is stopped: it asks for its read's state later."""
    story.prefilled("p-stopped", [5, 6])
    story.begin("d-stopped", "p-stopped", [5, 6])
    # Prefill has not looked for notifications since: stock's lease ends although the bytes may have been read.
    story.prefill.worker.nixl_wrapper.get_new_notifs = dict  # none has come yet
    story.expire("p-stopped", [5, 6])
    del story.prefill.worker.nixl_wrapper.get_new_notifs
    return {"failed": story.received("d-stopped", [5, 6])["failed"]}


def again(story: Story) -> dict[str, Any]:
    """A second reader comes with the request's parameters after the first has read it, as after a router's retry."""
    story.prefilled("p-again", [7, 8])
    story.begin("d-first", "p-again", [7, 8])
    first = story.received("d-first", [7, 8])
    assert story.was_notified("p-again")
    story.prefill.fill([7, 8], OTHER)
    story.begin("d-second", "p-again", [7, 8])
    return {"first": first, "second": story.received("d-second", [7, 8])}


def same_id(story: Story) -> dict[str, Any]:
    """After its lease has ended, another request comes with its id, and the first's reader after that."""
    story.prefilled("p-same", [9, 10])
    story.expire("p-same", [9, 10])
    story.prefilled("p-same", [11, 12])
    story.begin("d-same", "p-same", [9, 10])
    return story.received("d-same", [9, 10])


def aborted(story: Story) -> dict[str, Any]:
    """Prefill is told that a request of a batch is not to be read after all."""
    story.prefilled("p-aborted", [13, 14])
    del story.prefill.worker._reqs_to_send["p-aborted"]  # as if it had not finished
    story.prefill.step(reqs_not_processed={"p-aborted"})
    story.prefill.fill([13, 14], OTHER)
    story.begin("d-aborted", "p-aborted", [13, 14])
    return story.received("d-aborted", [13, 14])


def passed(story: Story) -> dict[str, Any]:
    """A lease whose time is over, begun after one that still runs; something else than the worker frees its blocks."""
    story.prefilled("p-runs", [15, 16])
    story.prefilled("p-passed", [17, 18], lease=-1.0)
    story.prefill.ended()
    story.prefill.fill([17, 18], OTHER)
    story.begin("d-passed", "p-passed", [17, 18])
    result = story.received("d-passed", [17, 18])
    for request_id in story.prefill.worker._reqs_to_send:  # so that the next case begins with none
        story.prefill.worker._reqs_to_send[request_id] = time.perf_counter() - 1
    story.prefill.ended()
    return result


def hybrid(story: Story) -> dict[str, Any]:
    """The lease has ended, and the worker takes its model for one of several kinds of layers."""
    worker = story.decode.worker
    story.prefilled("p-hybrid", [19, 20])
    story.expire("p-hybrid", [19, 20])
    before, worker._is_hma_required = getattr(worker, "_is_hma_required", None), True
    story.begin("d-hybrid", "p-hybrid", [19, 20])
    result = story.received("d-hybrid", [19, 20])
    worker._is_hma_required = before
    return result


class Held:
    """A binding of NIXL's that says of one transfer that it is still under way, and notes which others are."""

    def __init__(self, real: Any, handle: int) -> None:
        self.real, self.handle = real, handle
        self.answers: dict[int, Any] = {}  # the last one of each other transfer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def postXferReq(self, handle: int, *more: Any) -> Any:
        self.answers[handle] = answer = self.real.postXferReq(handle, *more)
        return answer

    def getXferStatus(self, handle: int) -> Any:
        if handle == self.handle:
            return nixl_bindings.NIXL_IN_PROG
        self.answers[handle] = answer = self.real.getXferStatus(handle)
        return answer

    def all_ended(self) -> bool:
        return bool(self.answers) and nixl_bindings.NIXL_IN_PROG not in self.answers.values()


def two_reads(story: Story) -> dict[str, Any]:
    """The lease has ended, and decode reads twice, as from a prefill of more ranks: the second read comes late."""
    worker = story.decode.worker
    story.prefilled("p-two", [21, 22])
    story.expire("p-two", [21, 22])
    once = worker._read_blocks
    worker._read_blocks = lambda **parameters: (once(**parameters), once(**parameters))
    story.begin("d-two", "p-two", [21, 22])
    del worker._read_blocks
    second = worker._recving_transfers["d-two"][1]
    agent = worker.nixl_wrapper
    agent.agent = Held(agent.agent, second._handle)
    ended: list[str] = []

    def step() -> bool:
        ended.extend(story.decode.ended()[1])
        return bool(agent.agent.all_ended())

    until(step)  # for the first read, and for what is then read of prefill's leases
    step()
    agent.agent = agent.agent.real
    result = {"while_read": ended, "failed": story.received("d-two", [21, 22])["failed"]}
    return {**result, "afterwards": sorted(set().union(*(story.decode.ended()[1] for _ in range(20))))}


CASES = (in_time, late, stopped, again, same_id, aborted, passed, hybrid, two_reads)


def look_at_the_release(model_config: Any) -> None:
    """In which form its workers are given what to read, and say what has ended."""
    global BASE, BY_REQUEST, GROUPS, RECEIVE
    probe = nixl_agents.make_worker(model_config)
    BASE = type(probe)
    metadata = sys.modules[BASE.__module__].NixlConnectorMetadata
    RECEIVE = inspect.signature(metadata.add_new_req_to_recv).parameters
    GROUPS = "BlockIds" in str(RECEIVE["local_block_ids"].annotation) or "tuple" in str(
        RECEIVE["local_block_ids"].annotation
    )
    BY_REQUEST = hasattr(BASE, "get_transfer_results")


def played(model_config: Any, directory: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """The cases by their names, to be called in this order: the last of them need engines of their own."""
    nixl_agents.begin_distributed(model_config, directory / "rendezvous")
    look_at_the_release(model_config)
    prefill = Side(model_config)
    prefill.listen()
    decode = Side(model_config)
    story = Story(prefill, decode)
    without = Side(model_config, guarded=False)

    def prefill_without() -> dict[str, Any]:
        prefill.deaf()
        without.listen()
        return {"in_time": in_time(Story(without, decode)), "late": late(Story(without, decode))}

    def asleep() -> dict[str, Any]:
        """Both are of a model that may sleep: from 0.33.0 an agent is then made without a backend, which comes after."""
        without.deaf()
        model_config.enable_sleep_mode = True
        sides = Side(model_config), Side(model_config)
        model_config.enable_sleep_mode = False
        sides[0].listen()
        return late(Story(*sides))

    return {
        **{case.__name__: functools.partial(case, story) for case in CASES},
        "decode_without": lambda: in_time(Story(prefill, without)),
        "prefill_without": prefill_without,
        "asleep": asleep,
    }


def main() -> None:
    real.quiet()
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        result = {name: case() for name, case in played(model_config, Path(directory)).items()}
    print_result({"pid": os.getpid(), "cases": result}, vllm)
    leave()


if __name__ == "__main__":
    main()
