# mypy: disable-error-code="import-not-found"
"""Drive one release's expert parallelism over MoRI with FP8, on a CPU; print what happened as one JSON object.

Run by a fresh interpreter with the release's sources and the stand-ins for mori and AITER, and the bundle or not, on
PYTHONPATH. Real are vLLM's classes: the kernel of prepare, experts and finalize, and the MoE layer. The stand-ins
quantise for real, and keep a record of it. What to expect of which release is none of this script's business.
"""

from __future__ import annotations

import gc
import os

gc.disable()
# vLLM logs to stdout, which here belongs to the result.
RESULT = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

import contextlib
import dataclasses
import json
import logging
import traceback
from types import SimpleNamespace
from typing import Any
from unittest import mock

import aiter
import mori
import torch
import vllm
from aiter.fused_moe import fused_moe, restored
from vllm import _aiter_ops
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import config as moe
from vllm.model_executor.layers.fused_moe import layer, modular_kernel
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.worker.workspace import init_workspace_manager

try:
    from vllm.model_executor.layers.fused_moe import rocm_aiter_fused_moe
except ImportError:  # from 0.21.0
    from vllm.model_executor.layers.fused_moe.experts import rocm_aiter_moe as rocm_aiter_fused_moe
try:
    from vllm.model_executor.layers.fused_moe.mori_prepare_finalize import MoriPrepareAndFinalize
except ImportError:  # from 0.20.2
    from vllm.model_executor.layers.fused_moe.prepare_finalize.mori import MoriPrepareAndFinalize

gc.freeze()
gc.enable()

FP8 = torch.float8_e4m3fn
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 5, 256, 128, 4, 2


def parallel(backend: str = "mori") -> Any:
    """What the release calls the layer's parallelism: one rank of two."""
    values = {
        **dict.fromkeys(("tp_size", "pcp_size", "sp_size"), 1),
        **dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0),
        **dict.fromkeys(("dp_size", "ep_size"), 2),
        "use_ep": True,
        "all2all_backend": backend,
        "is_sequence_parallel": False,
        "enable_eplb": False,
    }
    return made(moe.FusedMoEParallelConfig, values)


def made(kind: type, values: dict[str, Any]) -> Any:
    """An object of a dataclass whose fields differ between releases."""
    return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values})


def moe_config(backend: str = "mori") -> Any:
    values = {
        **dict.fromkeys(("num_experts", "num_local_experts", "num_logical_experts"), EXPERTS),
        "experts_per_token": TOP_K,
        "hidden_dim": HIDDEN,
        **dict.fromkeys(("intermediate_size", "intermediate_size_per_partition"), INTERMEDIATE),
        "moe_parallel_config": parallel(backend),
        "in_dtype": torch.bfloat16,
        "activation": silu(),
        "device": "cpu",
        "routing_method": moe.RoutingMethodType.Default,
        "max_num_tokens": 64,
    }
    return made(moe.FusedMoEConfig, values)


def silu() -> Any:
    """The activation's name, which became an enumeration in 0.17."""
    kind = getattr(rocm_aiter_fused_moe, "MoEActivation", None)
    return "silu" if kind is None else kind.SILU


def quantised(weights: Any, scheme: str) -> tuple[Any, Any]:
    """Weights (experts, rows, columns) in FP8, and their scales: one an expert, a row, or a block of 128 by 128."""
    experts, rows, columns = weights.shape
    shape = {"tensor": (1, 1), "token": (rows, 1), "block": (rows // 128, columns // 128)}[scheme]
    blocks = weights.view(experts, shape[0], rows // shape[0], shape[1], columns // shape[1])
    scale = blocks.abs().amax((2, 4)) / torch.finfo(FP8).max
    wide = scale.repeat_interleave(rows // shape[0], 1).repeat_interleave(columns // shape[1], 2)
    return (weights / wide).to(FP8), scale.view(experts) if scheme == "tensor" else scale


def experts_run(scheme: str) -> dict[str, Any]:
    """One MoE layer's kernel over five tokens: what was quantised, what the experts got, how right the result is."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    w1 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) / 16
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / 16
    ids = torch.randint(0, EXPERTS, (TOKENS, TOP_K), generator=generator, dtype=torch.int32)
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    if scheme == "none":
        quant_config = moe.FUSED_MOE_UNQUANTIZED_CONFIG
        given1, given2 = w1.bfloat16(), w2.bfloat16()
        w1, w2 = given1.float(), given2.float()
    else:
        (given1, scale1), (given2, scale2) = quantised(w1, scheme), quantised(w2, scheme)
        w1, w2 = restored(given1, scale1), restored(given2, scale2)
        quant_config = moe.fp8_w8a8_moe_quant_config(
            scale1,
            scale2,
            per_act_token_quant=scheme == "token",
            per_out_ch_quant=scheme == "token",
            block_shape=[128, 128] if scheme == "block" else None,
        )
    # As all2all_utils decides it in these releases.
    prepare = MoriPrepareAndFinalize(
        mori.ops.EpDispatchCombineOp(),
        max_tokens_per_rank=64,
        num_dispatchers=1,
        use_fp8_dispatch=quant_config.is_per_act_token or quant_config.is_block_quantized,
    )
    experts = rocm_aiter_fused_moe.AiterExperts(moe_config(), quant_config)
    kernel_class = getattr(modular_kernel, "FusedMoEKernel", None) or modular_kernel.FusedMoEModularKernel
    kernel = kernel_class(prepare, experts)
    run = getattr(kernel, "apply", kernel) if hasattr(modular_kernel, "FusedMoEKernel") else kernel
    given: list[Any] = []

    def recorded(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        given.append(hidden_states.dtype)
        return fused_moe(hidden_states, *args, **kwargs)

    aiter.quantised.clear()
    result = {"asks_for_unquantised": bool(experts.expects_unquantized_inputs)}
    try:
        with mock.patch("aiter.fused_moe.fused_moe", recorded):
            out = run(
                hidden_states=tokens,
                w1=given1,
                w2=given2,
                topk_weights=weights,
                topk_ids=ids,
                activation=silu(),
                global_num_experts=EXPERTS,
                expert_map=None,
                apply_router_weight_on_input=False,
            )
    except NotImplementedError as error:
        return {**result, "outcome": f"NotImplementedError in {traceback.extract_tb(error.__traceback__)[-1].name}"}
    right = fused_moe(tokens.float(), w1, w2, weights, ids)
    distance = float((out.float() - right).norm() / right.norm())
    return {
        **result,
        "outcome": "runs",
        "quantised": list(aiter.quantised),
        "given": [str(dtype) for dtype in given],
        "distance": distance,
    }


def register_aiter_experts() -> None:
    """Register the release's own operator over AITER's experts, which it does by itself on AITER's GPUs only."""
    direct_register_custom_op(
        op_name="rocm_aiter_fused_moe",
        op_func=_aiter_ops._rocm_aiter_fused_moe_impl,
        mutates_args=[],
        fake_impl=_aiter_ops._rocm_aiter_fused_moe_fake,
        dispatch_key="CPU",
    )


def layer_built() -> str:
    """Build a MoE layer over MoRI where AITER is off: what comes of it."""
    two = SimpleNamespace(rank_in_group=0, world_size=2)
    one = SimpleNamespace(rank_in_group=0, world_size=1)
    doubles: dict[str, Any] = {"get_dp_group": two, "get_ep_group": two, "get_tp_group": one, "get_pcp_group": one}
    doubles |= {"get_tensor_model_parallel_rank": 0, "get_tensor_model_parallel_world_size": 1}
    # What holds the weights: no release has one for a machine that is none in particular.
    doubles["UnquantizedFusedMoEMethod"] = mock.MagicMock(spec=layer.FusedMoEMethodBase)
    vllm_config = VllmConfig(
        parallel_config=ParallelConfig(all2all_backend="mori", enable_expert_parallel=True),
        device_config=DeviceConfig(device="cpu"),
    )
    with contextlib.ExitStack() as stack:
        for module in (layer, moe):
            for name, double in doubles.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, return_value=double))
        stack.enter_context(mock.patch.object(moe.FusedMoEParallelConfig, "make", return_value=parallel()))
        stack.enter_context(set_current_vllm_config(vllm_config))
        try:
            built = layer.FusedMoE(
                num_experts=EXPERTS,
                top_k=TOP_K,
                hidden_size=HIDDEN,
                intermediate_size=INTERMEDIATE,
                params_dtype=torch.bfloat16,
                tp_size=1,
                dp_size=2,
                pcp_size=1,
                prefix="experts",
            )
        except AssertionError as error:
            return f"AssertionError in {traceback.extract_tb(error.__traceback__)[-1].name}: {error}"
    return "built over MoRI" if built.moe_config.use_mori_kernels else "built over something else"


def main() -> None:
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    torch.accelerator.empty_cache = lambda: None  # which from 0.20.2 on a workspace that grows asks for
    init_workspace_manager(torch.device("cpu"))
    register_aiter_experts()
    result = {
        "vllm": vllm.__file__,
        "schemes": {scheme: experts_run(scheme) for scheme in ("none", "tensor", "token", "block")},
        "elsewhere": bool(
            rocm_aiter_fused_moe.AiterExperts(
                moe_config("allgather_reducescatter"), moe.FUSED_MOE_UNQUANTIZED_CONFIG
            ).expects_unquantized_inputs
        ),
        "layer": layer_built(),
    }
    print(json.dumps(result), file=RESULT, flush=True)


if __name__ == "__main__":
    main()
