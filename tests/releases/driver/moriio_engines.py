# mypy: disable-error-code="import-not-found"
"""Real MoRI-IO engines of one release, from 0.24.0 on: the release's own connector of a scheduler and of a worker.

A prefill engine and a decode engine talk to each other as in two processes, by the release's own protocol, on KV caches
in host memory, over the stand-in for the `mori` package. Doubles are those of moriio_worker, requests, and which role
whose thread has: a release keeps one role a process.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import zmq
from moriio_worker import BLOCK_SIZE, BLOCKS, HEAD_SIZE, HEADS, HOST, LAYERS, common, connector
from moriio_worker import set_up as set_up_worker
from ports import free_port
from vllm.config import CUDAGraphMode, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_engine
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

ROLES: dict[threading.Thread, Any] = {}
"""The role of the engine that a thread is part of, or acts for at the time."""


def set_up() -> None:
    """Tell the release's modules of machines with one rank each and no GPU."""
    set_up_worker()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    ranks = SimpleNamespace(rank_in_group=0, cpu_group=torch.distributed.group.WORLD)
    connector.get_tp_group = lambda: ranks
    if hasattr(connector, "get_forward_context"):
        forward = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.NONE)
        connector.get_forward_context = lambda: forward
    for module in (connector, moriio_engine):
        module.get_role = lambda: ROLES[threading.current_thread()]


def caches(spec: Any, value: float) -> dict[str, Any]:
    """KV caches as the release lays them out, a tensor a layer, with other values in every layer and block."""
    packed = hasattr(spec, "num_states")  # from 0.29.0 on all releases' layers are [blocks, heads, states, content]
    shape = (BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE) if packed else (BLOCKS, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)
    size = torch.Size(shape).numel()
    return {name: value * (torch.arange(size) + 1000.0 * (i + 1)).view(shape) for i, name in enumerate(LAYERS)}


class Engine:
    """One engine. `answers` handshakes: "yes", "no" (nobody listens) or "garbage"."""

    def __init__(
        self, *, producer: bool, read: bool, transfer: float, defer: float, value: float = 0.0, answers: str = "yes"
    ) -> None:
        self.handshake_port, self.notify_port = free_port(), free_port()
        self.role = common.ROLE.PRODUCER if producer else common.ROLE.CONSUMER
        extra = {
            "proxy_ip": "",
            "proxy_ping_port": 0,
            "http_port": 0,
            "handshake_port": self.handshake_port,
            "notify_port": self.notify_port,
            "read_mode": read,
            "transfer_timeout": transfer,
            "defer_timeout": defer,
        }
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
        groups = [KVCacheGroupSpec(list(LAYERS), spec)]
        cache_config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        config = _config(extra, "kv_producer" if producer else "kv_consumer")
        self._acts()
        self.scheduler: Any = connector.MoRIIOConnector(config, KVConnectorRole.SCHEDULER, cache_config)
        self.worker: Any = connector.MoRIIOConnector(config, KVConnectorRole.WORKER, cache_config)
        self.real: Any = self.worker.connector_worker
        self.caches = caches(spec, value)
        self.by_group = hasattr(self.scheduler, "request_finished_all_groups")
        self.held: set[str] = set()
        self.freed: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.failed: set[str] = set()
        if answers == "yes":
            self.worker.register_kv_caches(self.caches)
            ROLES[self.real.moriio_wrapper.notify_thread] = self.role
        elif answers == "garbage":
            threading.Thread(target=self._answer_garbage, daemon=True).start()

    def _acts(self) -> None:
        """What this thread does now, it does as this engine."""
        ROLES[threading.current_thread()] = self.role

    def _answer_garbage(self) -> None:
        with contextlib.suppress(zmq.ZMQError), zmq.Context().socket(zmq.ROUTER) as answering:
            answering.bind(f"tcp://{HOST}:{self.handshake_port}")
            while True:
                identity, *_ = answering.recv_multipart()
                answering.send_multipart([identity, b"", b"garbage"])

    def allocate(self, request: Any, external: int) -> None:
        """The scheduler has blocks for the request; a decode engine that is written to tells the prefill engine now."""
        self._acts()
        groups = (list(request.blocks),)
        blocks = SimpleNamespace(get_block_ids=lambda *args, **kwargs: groups)
        self.scheduler.update_state_after_alloc(request, blocks, external)

    def step(self, *requests: Any, before_save: Any = lambda: None) -> None:
        """The forward pass of a step in which these requests are computed, as far as the connector sees it."""
        self._acts()
        output = SimpleNamespace(
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[]),
            num_scheduled_tokens={request.request_id: request.num_prompt_tokens for request in requests},
            new_block_ids_to_zero=None,
        )
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(None)
        for name in LAYERS:
            self.worker.wait_for_layer_load(name)
            self.worker.save_kv_layer(name, self.caches[name], None)
        before_save()
        self.worker.wait_for_save()

    def finish(self, request: Any) -> dict[str, Any] | None:
        """The request ends by its length, as a prefill does; what its client is told."""
        self._acts()
        blocks = list(request.blocks)
        if self.by_group:
            held, parameters = self.scheduler.request_finished_all_groups(request, (blocks,))
        else:
            held, parameters = self.scheduler.request_finished(request, blocks)
        if held:
            self.held.add(request.request_id)
        else:
            self.freed[request.request_id] += 1
        return dict(parameters) if parameters else None

    def report(self) -> None:
        """What the worker reports at a step's end, and what the scheduler makes of it."""
        self._acts()
        results = getattr(self.worker, "get_transfer_results", None)
        if results is not None:
            found = results(set())
            sent, received = found.finished_sending, found.finished_recving
            self.failed |= set(found.failed_recving or ())
        else:
            sent, received = self.worker.get_finished(set())
        output = KVConnectorOutput(finished_sending=set(sent or ()), finished_recving=set(received or ()))
        self.scheduler.update_connector_output(output)
        self.freed.update(output.finished_sending or ())
        self.received.update(set(output.finished_recving or ()) - self.failed)

    def keeps(self) -> list[str]:
        """What the engine still keeps of requests."""
        writer, wrapper, scheduler = self.real._writer, self.real.moriio_wrapper, self.scheduler.connector_scheduler
        kept = {
            "blocks": self.held - set(self.freed),
            "allocations": wrapper.done_remote_allocate_req_dict,
            "deferred writes": writer._deferred_tasks,
            "counts": writer._scheduled_writes,
            "ids": scheduler.transfer_id_to_request_id,
        }
        return [name for name, what in kept.items() if what]

    def close(self) -> None:
        self.real._handshake_initiation_executor.shutdown(wait=False)


def _config(extra: dict[str, Any], role: Any) -> Any:
    """The engine's configuration, as far as any release's connector reads it."""
    transfer = KVTransferConfig(kv_connector="MoRIIOConnector", kv_role=role, kv_connector_extra_config=extra)
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(
            data_parallel_rank=0,
            data_parallel_size=1,
            data_parallel_size_local=1,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(block_size=BLOCK_SIZE, cache_dtype="auto", mamba_cache_mode="none"),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        speculative_config=None,
        num_lookahead_tokens=0,
        num_speculative_tokens=0,
        model_config=SimpleNamespace(
            use_mla=False,
            dtype=torch.float32,
            get_head_size=lambda: HEAD_SIZE,
            get_total_num_kv_heads=lambda: HEADS,
            hf_config=SimpleNamespace(model_type="llama"),
        ),
    )


class Pair:
    """One prompt: the request of the prefill engine and that of the decode engine, and whose blocks each has."""

    _numbers = iter(range(1, 1_000_000))

    def __init__(self, prefill: Engine, decode: Engine, blocks: list[int], remote_blocks: list[int]) -> None:
        number = next(self._numbers)
        addresses = [f"host:{HOST},handshake:{e.handshake_port},notify:{e.notify_port}" for e in (prefill, decode)]
        # As the router names it; each engine adds to it.
        named = f"cmpl-___prefill_addr_{addresses[0]}___decode_addr_{addresses[1]}_{number:032x}"
        self.prefill, self.decode = prefill, decode
        self.transfer_id = f"tx-{number}"
        self.at_prefill = self._request(f"{named}-0-aa", blocks, decode, {"do_remote_decode": True})
        self.at_decode = self._request(f"{named}-0-bb", remote_blocks, prefill, {"do_remote_prefill": True})

    def _request(self, name: str, blocks: list[int], peer: Engine, what: dict[str, Any]) -> Any:
        """A request as the router sends it where it sends both at once."""
        parameters = {
            "do_remote_decode": False,
            "do_remote_prefill": False,
            "transfer_id": self.transfer_id,
            "remote_block_ids": None,
            "remote_engine_id": None,
            "remote_host": HOST,
            "remote_handshake_port": peer.handshake_port,
            "remote_notify_port": peer.notify_port,
            "remote_dp_size": 1,
            "remote_dp_rank": 0,
            "tp_size": 1,
            **what,
        }
        return SimpleNamespace(
            request_id=name,
            kv_transfer_params=parameters,
            blocks=blocks,
            num_prompt_tokens=len(blocks) * BLOCK_SIZE,
            num_computed_tokens=0,
            status=RequestStatus.FINISHED_LENGTH_CAPPED,
        )

    def allocate(self) -> None:
        """The decode engine has blocks for the prompt, and tells the prefill engine, which has heard of it."""
        self.decode.allocate(self.at_decode, self.at_decode.num_prompt_tokens)
        self.decode.step()

    def arrived(self) -> bool:
        """Whether both engines have the same in the prompt's blocks, in all layers, and it is not what was there before."""
        for name in LAYERS:
            here = self.prefill.caches[name][self.at_prefill.blocks]
            there = self.decode.caches[name][self.at_decode.blocks]
            if not torch.equal(here, there) or not here.all():
                return False
        return True
