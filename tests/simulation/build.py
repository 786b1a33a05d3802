# mypy: disable-error-code="import-not-found"
"""The release's own scheduler, with a small pool, one KV group or three, and the simulated connector."""

from __future__ import annotations

import inspect
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import real_scheduler as real
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.simulation.connectors import BEHAVIOURS
from tests.simulation.plan import BLOCK, Plan

WINDOW = 2 * BLOCK
"""Tokens that a sliding-window group attends to."""
LONGEST = real.MAX_MODEL_LEN
END_TOKEN = 2


@lru_cache
def failures_by_request() -> bool:
    """Whether a failed load can be reported by its request's id: with several KV groups it must be."""
    return "failed_recving" in {field.name for field in fields(KVConnectorOutput)}


@lru_cache
def serves_several_groups() -> bool:
    """Whether the scheduler can load for more than one KV group: to 0.17 it takes one table apart."""
    return "get_block_ids" not in inspect.unwrap(real.Scheduler._update_waiting_for_remote_kv).__code__.co_names


@lru_cache
def keeps_all_hits() -> bool:
    """Whether what one KV group has cached cannot be given to another one's load of the same request (vllm#33775)."""
    return hasattr(SingleTypeKVCacheManager, "add_local_computed_blocks")


@lru_cache
def _model_config(directory: str) -> Any:
    init_none_hash(sha256)
    return real.make_model_config(Path(directory))


@lru_cache
def _vllm_config(mode: str, connector: str, policy: str, directory: str) -> Any:
    transfer: dict[str, Any] = {
        "kv_connector": f"Simulated{connector}",
        "kv_connector_module_path": "tests.simulation.scheduler_side",
        "kv_role": "kv_both",
    }
    option = inspect.signature(KVTransferConfig).parameters.get("kv_load_failure_policy")
    if option is not None and option.default != policy:  # where somebody sets it, failed-loads follows it
        transfer["kv_load_failure_policy"] = policy
    config = VllmConfig(
        model_config=_model_config(directory),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=LONGEST,
            max_model_len=LONGEST,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            disable_hybrid_kv_cache_manager=True,
            async_scheduling=mode == "AsyncScheduler",
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(**transfer),
        device_config=DeviceConfig(device="cpu"),
    )
    real.as_on_a_gpu(config, mode)
    return config, StructuredOutputManager(config)


def _groups(kind: str) -> list[Any]:
    shape = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if kind == "hybrid":
        for name in ("sliding.0", "sliding.1"):
            groups.append(KVCacheGroupSpec([name], SlidingWindowSpec(**shape, sliding_window=WINDOW)))
    return groups


def make_scheduler(mode: str, plan: Plan, directory: str) -> Any:
    """A fresh scheduler of the class `mode`, as the plan wants it."""
    config, manager = _vllm_config(mode, BEHAVIOURS[plan.connector].class_name, plan.policy, directory)
    blocks = plan.blocks * 3 if plan.groups == "hybrid" else plan.blocks
    config.cache_config.num_gpu_blocks = blocks
    scheduler = real.SCHEDULERS[mode](
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=_groups(plan.groups)),
        structured_output_manager=manager,
        block_size=BLOCK,
        log_stats=True,
    )
    scheduler.max_num_scheduled_tokens = plan.budget
    return scheduler


def make_request(name: str, tokens: list[int], outputs: int, stops: bool) -> Any:
    """A request of these prompt tokens, ended by `outputs` tokens, or by the end token where it `stops`."""
    return Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=_sampling(outputs, stops),
        pooling_params=None,
        block_hasher=_hasher(),
        **real.end_token_named_per_request(),
    )


@lru_cache
def _hasher() -> Any:
    return get_request_block_hasher(BLOCK, sha256)


def _sampling(outputs: int, stops: bool) -> Any:
    if not stops:
        return SamplingParams(max_tokens=outputs, ignore_eos=True)
    return SamplingParams(max_tokens=outputs + 5, stop_token_ids=[END_TOKEN])
