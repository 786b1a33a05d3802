"""Both halves of a release's Mooncake connector on CPU memory, with Mooncake's real transfer engine over tcp.

The connectors are the release's own, of both roles, made by its factory. Who plays the scheduler says which requests
there are and what became of them. One thing is not as in the release: `torch.accelerator`, of which a machine without
one has no answer to give, says that the device is the CPU.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm.platforms

if not hasattr(torch._C._cpu, "_is_avx512_supported"):
    torch._C._cpu._is_avx512_supported = lambda: False  # 0.17 asks for it by a name that later releases of torch lack
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()
os.environ["VLLM_HOST_IP"] = "127.0.0.1"
torch.accelerator.current_device_index = lambda: "cpu"

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus

BLOCKS = 61
"""Blocks of each side, a number that is no other dimension of the cache."""
LAYER = "model.layers.0.self_attn.attn"
LAYERS = [LAYER]
"""Of a model. A driver may add to it before it makes a side."""
SECONDS = 60.0


@dataclass
class Model:
    """What of a model a connector looks at. A driver may change it before it makes a side."""

    config: dict[str, Any] = field(default_factory=dict)  # of its configuration file, beside a tiny Llama's
    options: dict[str, Any] = field(default_factory=dict)  # of the engine's configuration
    prefix_caching: bool = True

    def groups(self, heads: int) -> list[Any]:
        """The KV caches of a worker with so many heads."""
        return [KVCacheGroupSpec([*LAYERS], FullAttentionSpec(**shape_of(heads)))]

    def cache(self, layer: str, heads: int) -> Any:
        """A layer's memory, of a worker with so many heads."""
        return torch.zeros(cache_shape(heads))

    def registered(self, caches: dict[str, Any]) -> dict[str, Any]:
        """What the connector gets to see of them."""
        return caches


MODEL = Model()


def shape_of(heads: int) -> dict[str, Any]:
    return {"block_size": 32, "num_kv_heads": heads, "head_size": 32, "dtype": torch.float32}


def make_config(model_config: Any, role: str, engine_id: str, extra: dict[str, Any], size: int = 1) -> Any:
    config = VllmConfig(
        model_config=model_config,
        parallel_config=ParallelConfig(tensor_parallel_size=size),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=256,
            max_model_len=256,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            disable_hybrid_kv_cache_manager=all(
                isinstance(group.kv_cache_spec, FullAttentionSpec) for group in MODEL.groups(1)
            ),
        ),
        cache_config=CacheConfig(block_size=32),
        kv_transfer_config=KVTransferConfig(
            kv_connector="MooncakeConnector",
            kv_role=role,
            engine_id=engine_id,
            kv_connector_extra_config={"mooncake_protocol": "tcp", **extra},
        ),
        device_config=DeviceConfig(device="cpu"),
        **MODEL.options,
    )
    config.cache_config.block_size = 32  # 0.28.0's platform sets 16 for MLA
    config.scheduler_config.enable_chunked_prefill = True  # 0.33.0's turns it off for MLA on a CPU without AMX
    if hasattr(config.cache_config, "kv_cache_layout"):
        config.cache_config.kv_cache_layout = "NHD"  # from 0.29 the engine core says it before workers begin
    return config


def begin_distributed(model_config: Any, rendezvous: Path) -> None:
    """Make the process group of one rank that workers ask for theirs."""
    with set_current_vllm_config(make_config(model_config, "kv_producer", "none", {})):
        init_distributed_environment(1, 0, rendezvous.as_uri(), 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


@contextmanager
def ranked(rank: int, size: int) -> Iterator[None]:
    """Workers that are made now are of this rank, and an engine has so many."""
    group, world = parallel_state.get_tp_group(), parallel_state.get_world_group()
    was = group.rank_in_group, group.world_size, world.local_rank
    group.rank_in_group, group.world_size, world.local_rank = rank, size, rank
    try:
        yield
    finally:
        group.rank_in_group, group.world_size, world.local_rank = was


def cache_shape(heads: int) -> tuple[int, ...]:
    """The shape that the release's CPU backend gives a cache."""
    # From 0.29 the layout is the configuration's, and K and V of a block lie together.
    shape_of = getattr(CPUAttentionBackend, "get_kv_cache_shape", lambda *_: (BLOCKS, heads, 32, 64))
    shape: tuple[int, ...] = shape_of(BLOCKS, 32, heads, 32)
    topology: Any = getattr(utils, "TransferTopology", None)
    if len(shape) == 4 and hasattr(topology, "split_k_and_v"):
        topology.split_k_and_v = False  # 0.23.0 to 0.25.1 take the CPU's cache for two, and cannot register it
    return shape


class Side:
    """One engine's connector, of both roles, and its cache. A prefill engine has a bootstrap server at `port`.

    Of an engine of several (`size`), one worker's: it has its share of the heads.
    """

    def __init__(
        self, model_config: Any, role: str, engine_id: str, port: int, size: int = 1, heads: int = 2, **extra: Any
    ) -> None:
        os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(port)
        self.port, self.engine_id, self.size, self.heads = port, engine_id, size, heads // size
        self.model_config = model_config
        config = make_config(model_config, role, engine_id, extra, size)
        groups = MODEL.groups(self.heads)
        cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        with set_current_vllm_config(config):
            self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
            self.scheduler = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
            self.worker = self.connector.connector_worker
            try:
                self.register({layer: MODEL.cache(layer, self.heads) for layer in LAYERS})
            except AssertionError:  # to 0.18.1 only a layout that the CPU's backend has not
                self.register({layer: torch.zeros((2, BLOCKS, 32, self.heads, 32)) for layer in LAYERS})
        self.module = sys.modules[type(self.worker).__module__]
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.invalid: set[int] = set()

    def register(self, caches: dict[str, Any]) -> None:
        self.caches = caches
        self.cache = self.caches[LAYER]
        self.dimension = list(self.cache.shape).index(BLOCKS)
        self.connector.register_kv_caches(MODEL.registered(caches))

    def fill(self, blocks: Iterable[int], contents: float) -> None:
        for number in blocks:
            self.cache.select(self.dimension, number).fill_(contents + number)

    def holds(self, blocks: Iterable[int]) -> list[float]:
        """What lies in blocks: one number for each, or NaN where it is not one."""
        found = [self.cache.select(self.dimension, number).unique() for number in blocks]
        return [float(one.item()) if one.numel() == 1 else float("nan") for one in found]

    def step(self) -> None:
        """A step: the worker is told what the scheduler's side has, and says what has ended."""
        self.connector.bind_connector_metadata(self.scheduler.build_connector_meta(None))
        self.connector.start_load_kv(None)
        results = (
            self.connector.get_transfer_results(set()) if hasattr(self.connector, "get_transfer_results") else None
        )
        if results is None:
            sent, received = self.connector.get_finished(set())
        else:
            sent, received = results.finished_sending, results.finished_recving
            self.failed |= set(results.failed_recving or ())
        self.sent |= set(sent or ())
        self.received |= set(received or ())
        self.invalid |= set(self.connector.get_block_ids_with_load_errors())

    # What the scheduler would say

    def admit(self, request: Any, blocks: list[int]) -> None:
        """A request is given its blocks, all of them to be loaded where it loads."""
        given = SimpleNamespace(
            get_unhashed_block_ids=lambda: blocks,
            get_unhashed_block_ids_all_groups=lambda: [blocks],
            get_block_ids=lambda: [blocks],
            blocks=([SimpleNamespace(block_id=number, block_hash=None) for number in blocks],),
        )
        self.scheduler.get_num_new_matched_tokens(request, 0)
        self.scheduler.update_state_after_alloc(request, given, 32 * len(blocks))

    def finish(self, request: Any, blocks: list[int], status: str) -> bool:
        """A request ends; whether its blocks are kept for a transfer."""
        request.status = getattr(RequestStatus, status)
        finish = getattr(self.scheduler, "request_finished_all_groups", None)
        kept = finish(request, (blocks,)) if finish else self.scheduler.request_finished(request, blocks)
        return bool(kept[0])


def request(name: str, prompt: int, **parameters: Any) -> Any:
    """A request as far as a connector looks at it."""
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=parameters,
        prompt_token_ids=[1] * prompt,
        num_prompt_tokens=prompt,
        num_computed_tokens=0,
        status=RequestStatus.RUNNING,
    )


def prefilling(name: str, transfer: str, blocks: int) -> Any:
    return request(name, 32 * blocks, do_remote_decode=True, transfer_id=transfer)


def decoding(name: str, transfer: str, blocks: int, prefill: Side | SimpleNamespace) -> Any:
    return request(
        name,
        32 * blocks,
        do_remote_prefill=True,
        transfer_id=transfer,
        remote_engine_id=prefill.engine_id,
        remote_bootstrap_addr=f"http://127.0.0.1:{prefill.port}",
    )
