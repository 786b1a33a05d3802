# mypy: disable-error-code="import-not-found"
"""The real `Scheduler` and `KVCacheManager` of whichever vLLM is importable, small enough to drive by hand.

Everything is built the way the release's own engine core builds it, without network, device or weights. What
differs between releases is told by what a class or signature offers, never by a release number; each such
difference is one function whose name says it.
"""

from __future__ import annotations

import inspect
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from vllm import ModelRegistry, SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

SCHEDULERS = {"Scheduler": Scheduler, "AsyncScheduler": AsyncScheduler}
"""The classes that serve `async_scheduling` off and on; the latter is most releases' default."""

BLOCK_SIZE = 16
NUM_BLOCKS = 64
MAX_MODEL_LEN = 256
PROMPT_TOKENS = 3 * BLOCK_SIZE
LOADED_TOKENS = 2 * BLOCK_SIZE


class TinyForCausalLM(torch.nn.Module):  # type: ignore[misc]
    """What vLLM wants to see of a text model before it builds a configuration; no part of it ever runs.

    A registered class is inspected in this process. Naming a model of vLLM's own would cost a second
    interpreter, which imports all of vLLM again.
    """

    supports_lora = True
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    embedding_modules: ClassVar[dict[str, str]] = {}

    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: Any) -> None: ...

    get_input_embeddings = embed_input_ids

    def forward(self, input_ids: Any, positions: Any) -> None: ...

    def compute_logits(self, hidden_states: Any) -> None: ...


def make_model_config(directory: Path, heads: int = 2, others: Mapping[str, Any] | None = None) -> Any:
    """Return the ModelConfig of a model whose configuration file, with `others` beside, is written into `directory`."""
    ModelRegistry.register_model(TinyForCausalLM.__name__, TinyForCausalLM)
    values = {
        "architectures": [TinyForCausalLM.__name__],
        "model_type": "llama",
        "hidden_size": 32 * heads,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 256,
        "max_position_embeddings": MAX_MODEL_LEN,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **(others or {}),
    }
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return ModelConfig(model=str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN)


def as_on_a_gpu(vllm_config: Any, scheduler: str) -> None:
    """Let `scheduler` overlap its steps: from 0.27.1 on the CPU platform switches that off for every engine."""
    vllm_config.scheduler_config.async_scheduling = scheduler == AsyncScheduler.__name__


def with_each_scheduler(play: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return what `play` comes to with each scheduler class, by its name: it is given that, and a model's configuration."""
    quiet()
    with tempfile.TemporaryDirectory() as directory:
        model_config = make_model_config(Path(directory))
        return {name: play(name, model_config) for name in SCHEDULERS}


def make_scheduler(
    name: str,
    model_config: Any,
    connector: tuple[str, str] | None,
    windows: Iterable[int] = (),
    adapters: int = 0,
    options: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """Return a fresh scheduler of the class `name`, with statistics on, serving `connector` (module, class) or none.

    `windows` are the sliding windows, in tokens, of further KV cache groups beside the one of full attention; `adapters`
    is `max_loras`, 0 for no LoRA; `options` are the scheduler configuration's, beside those set here; `extra` is the
    connector's own configuration.
    """
    return scheduler_of(name, make_config(name, model_config, connector, adapters, options, extra), windows)


def make_config(
    name: str,
    model_config: Any,
    connector: tuple[str, str] | None,
    adapters: int = 0,
    options: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    workers: int = 1,
) -> Any:
    """Return what a scheduler is made of; `workers` are those of one tensor-parallel group."""
    vllm_config = VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            disable_hybrid_kv_cache_manager=True,
            async_scheduling=name == AsyncScheduler.__name__,
            **{"max_num_seqs": 16, "max_num_batched_tokens": MAX_MODEL_LEN, **(options or {})},
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector[1],
            kv_connector_module_path=connector[0],
            kv_role="kv_both",
            kv_connector_extra_config=dict(extra or {}),
        )
        if connector
        else None,
        device_config=DeviceConfig(device="cpu"),
        lora_config=LoRAConfig(max_loras=adapters) if adapters else None,
    )
    if workers > 1:
        vllm_config.parallel_config.tensor_parallel_size = vllm_config.parallel_config.world_size = workers
    as_on_a_gpu(vllm_config, name)
    vllm_config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return vllm_config


def scheduler_of(name: str, vllm_config: Any, windows: Iterable[int] = ()) -> Any:
    """Return a scheduler of the class `name`."""
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    specs = [FullAttentionSpec(**shape), *(SlidingWindowSpec(**shape, sliding_window=window) for window in windows)]
    init_none_hash(sha256)
    return SCHEDULERS[name](
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)],
        ),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


def make_request(
    request_id: str, *, load: bool | str = False, delay_free: bool = False, tokens: int = 2, prompt: int = PROMPT_TOKENS
) -> Any:
    """Return a request of `prompt` tokens, unlike every other request's, that ends after `tokens` more.

    `load` and `delay_free` travel as transfer parameters, as from a client, and are read by the connector.
    """
    params = SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"load": load, "delay_free": delay_free}},
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=[1 + byte for byte in request_id.encode().ljust(prompt, b".")],
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        **end_token_named_per_request(),
    )


def end_token_named_per_request() -> dict[str, int]:
    """Older requests carry the end token themselves; later ones find it in their sampling parameters."""
    return {"eos_token_id": 2} if "eos_token_id" in inspect.signature(Request).parameters else {}


def computed_before(scheduled: Any) -> dict[str, int]:
    """Return how many tokens of each request in a step were computed before it."""
    cached = scheduled.scheduled_cached_reqs
    computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    return {**computed, **dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))}


def run_model(scheduled: Any) -> Any:
    """Return what a model runner would answer to a scheduler output: one token for each scheduled request."""
    ids = list(scheduled.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[[7] for _ in ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def transfers(recving: Iterable[str], sending: Iterable[str]) -> Any:
    """Return the workers' word that these transfers have ended."""
    return KVConnectorOutput(finished_recving=set(recving) or None, finished_sending=set(sending) or None)


def abort(scheduler: Any, request_id: str) -> None:
    """End a request as the engine core does when its client has gone."""
    scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)


def status_name(request: Any) -> str:
    """Return a request's status as vLLM names it."""
    return str(RequestStatus(request.status).name)


def free_blocks(scheduler: Any) -> int:
    """Return how many blocks of the pool nobody holds."""
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def held_blocks(scheduler: Any) -> list[int]:
    """Return the ids of the blocks whose reference count is not 0, the null block aside."""
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    return [block.block_id for block in blocks if block.ref_cnt and not block.is_null]


def counts_fetches() -> bool:
    """Tell whether the release counts loads by stage, for its statistics."""
    return hasattr(Scheduler, "_set_kv_fetch_stage")


def completed_fetches(scheduler: Any) -> int:
    """Return how many loads are counted as complete but not yet resumed, where the release counts them."""
    return int(scheduler._kv_fetch_counts["completed_waiting"])


def quiet() -> None:
    """Leave only errors in vLLM's log."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
