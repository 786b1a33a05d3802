# mypy: disable-error-code="import-not-found"
"""Drive one release's expert parallelism over MoRI with FP8, on a CPU; print what happened as one JSON object.

Run by a fresh interpreter with the release's sources and the stand-ins for mori and AITER, and the bundle or not, on
PYTHONPATH. Real are vLLM's classes: the kernel of prepare, experts and finalize, what makes its parts, and the MoE layer.
The stand-ins quantise for real, and keep a record of it. A release without MoRI's expert parallelism says what it lacks.
What to expect of which release is none of this script's business.
"""

from __future__ import annotations

from result import begin_driver, print_result

begin_driver()

import contextlib
import dataclasses
import gc
import importlib
import inspect
import logging
import traceback
import typing
from collections.abc import Callable, Iterator
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
from vllm.config.parallel import All2AllBackend
from vllm.model_executor.layers.fused_moe import all2all_utils, layer, modular_kernel
from vllm.model_executor.layers.fused_moe import config as moe
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.worker.workspace import init_workspace_manager

FUSED_MOE = "vllm.model_executor.layers.fused_moe"


def first_of(*names: str) -> Any:
    """The first of these modules that the release has, or None."""
    for name in names:
        try:
            return importlib.import_module(f"{FUSED_MOE}.{name}")
        except ModuleNotFoundError as error:
            if error.name is None or not f"{FUSED_MOE}.{name}".startswith(error.name):
                raise  # it is there, and lacks something else
    return None


rocm_aiter_fused_moe = first_of("rocm_aiter_fused_moe", "experts.rocm_aiter_moe")  # the second from 0.21.0
mori_prepare_finalize = first_of("mori_prepare_finalize", "prepare_finalize.mori")  # the second from 0.20.2

gc.freeze()
gc.enable()

FP8 = torch.float8_e4m3fn
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 5, 256, 128, 4, 2
BACKENDS = [name for name in typing.get_args(All2AllBackend) if name.startswith("mori")]
"""The release's names for MoRI; two from 0.23.0, for two kernels between machines."""

Given = tuple[Any, Any]
"""What AITER's experts were given: tokens, and their scale."""


def parallel(backend: str) -> Any:
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


def moe_config(backend: str) -> Any:
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


def prepare_and_finalize(config: Any, quant_config: Any) -> tuple[Any, dict[str, Any]]:
    """MoRI's part of the kernel as the release makes it, and what it announced to MoRI of the tokens that will be sent."""
    asked: dict[str, Any] = {}

    def handle(arguments: dict[str, Any]) -> Any:
        asked.update(arguments)
        return mori.ops.EpDispatchCombineOp()

    manager = SimpleNamespace(rank=0, world_size=1, get_handle=handle)
    group = SimpleNamespace(device_communicator=SimpleNamespace(all2all_manager=manager))
    # The release imports MoRI's part on the GPUs that MoRI is for only.
    part = mori_prepare_finalize.MoriPrepareAndFinalize
    with (
        mock.patch.object(all2all_utils, "get_ep_group", return_value=group),
        mock.patch.object(all2all_utils, "MoriPrepareAndFinalize", part, create=True),
    ):
        return all2all_utils.maybe_make_prepare_finalize(config, quant_config), asked


def aiter_experts(scheme: str, config: Any, quant_config: Any) -> Any:
    """AITER's experts of the release; from 0.33.0 those that say that they support the scheme."""
    kind = rocm_aiter_fused_moe.AiterExperts
    if inspect.isabstract(kind):
        names = {
            "none": (None, None),
            "tensor": ("kFp8StaticTensorSym", "kFp8DynamicTensorSym"),
            "token": ("kFp8StaticChannelSym", "kFp8DynamicTokenSym"),
            "block": ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
        }
        keys = [name and getattr(quant_utils, name) for name in names[scheme]]
        kind = next(one for one in kind.__subclasses__() if one._supports_quant_scheme(*keys))
    return kind(config, quant_config)


def asks_for_unquantised(experts: Any) -> bool:
    """Whether these experts say that they want their inputs unquantised, in the form that the release has."""
    asks = experts.expects_unquantized_inputs
    return bool(asks(experts.moe_config, experts.quant_config) if callable(asks) else asks)  # a method at 0.15


def away_by(computed_on: Given, tokens: Any) -> float:
    """How far what AITER computes on is from the tokens, by the farthest element: up to 1 is one rounding to FP8.

    FP8's numbers have 3 bits after the point: the nearest is away by a 16th of the value at most, and below the least
    exponent, -6, by half of 2 ** -9. What was not quantised has no scale, and no error.
    """
    values, scales = computed_on
    error = (values - tokens.float()).abs()
    if scales is None:
        return 0.0 if not error.any() else float("inf")
    return float((error / (tokens.float().abs() / 16 + scales * 2**-10)).max())


def experts_run(
    scheme: str, backend: str = BACKENDS[0] if BACKENDS else "", spoil: Callable[[Given], Given] | None = None
) -> dict[str, Any]:
    """One MoE layer's kernel over five tokens: what was quantised, what the experts got, how right the result is.

    `spoil`: what to make of that which AITER is given.
    """
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
    config = moe_config(backend)
    prepare, announced = prepare_and_finalize(config, quant_config)
    experts = aiter_experts(scheme, config, quant_config)
    kernel_class = getattr(modular_kernel, "FusedMoEKernel", None) or modular_kernel.FusedMoEModularKernel
    kernel = kernel_class(prepare, experts)
    run = getattr(kernel, "apply", kernel) if hasattr(modular_kernel, "FusedMoEKernel") else kernel
    given: list[Any] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(fused_moe).bind(*args, **kwargs)
        given.append(call.arguments["hidden_states"].dtype)
        if spoil is not None:
            spoilt = spoil((call.arguments["hidden_states"], call.arguments["a1_scale"]))
            call.arguments["hidden_states"], call.arguments["a1_scale"] = spoilt
        return fused_moe(*call.args, **call.kwargs)

    aiter.quantised.clear()
    aiter.computed_on.clear()
    result = {"asks_for_unquantised": asks_for_unquantised(experts)}
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
    (computed_on,) = aiter.computed_on
    quantised_here, away = list(aiter.quantised), away_by(computed_on, tokens)
    right = fused_moe(tokens.float(), w1, w2, weights, ids)
    distance = float((out.float() - right).norm() / right.norm())
    return {
        **result,
        "outcome": "runs",
        "quantised": quantised_here,
        "given": [str(dtype) for dtype in given],
        "announced": [str(announced["quant_dtype"]), announced["scale_dim"]],
        "away": away,
        "distance": distance,
    }


def as_if_unquantised(given: Given) -> Given:
    """FP8 numbers quantised as if they were the values: what they were scaled by is lost."""
    tokens, _ = given
    twice, scale = aiter.get_hip_quant(aiter.QuantType.per_Token)(tokens, quant_dtype=FP8)
    return twice, scale


def again(given: Given) -> Given:
    """FP8 numbers restored and quantised once more, by another scale: rounded twice."""
    scale = torch.full((1, 1), 1.3 * float(given[1].max()))
    twice, scale = aiter.get_hip_quant(aiter.QuantType.per_Tensor)(restored(*given), scale=scale, quant_dtype=FP8)
    return twice, scale.view(1, 1)


@contextlib.contextmanager
def aiter_on() -> Iterator[None]:
    """As on a machine whose GPUs AITER supports, where it was switched on, but for shared experts."""
    switches = {"_AITER_ENABLED": True, "_FMOE_ENABLED": True, "_MOE_SHARED_EXPERTS_ENABLED": False}
    with (
        mock.patch.object(_aiter_ops, "is_aiter_found_and_supported", return_value=True),
        mock.patch.multiple(_aiter_ops.rocm_aiter_ops, **switches),
    ):
        yield


def register_aiter_experts() -> None:
    """Register the release's own operator over AITER's experts, which it does by itself on AITER's GPUs only."""
    direct_register_custom_op(
        op_name="rocm_aiter_fused_moe",
        op_func=_aiter_ops._rocm_aiter_fused_moe_impl,
        mutates_args=[],
        fake_impl=_aiter_ops._rocm_aiter_fused_moe_fake,
        dispatch_key="CPU",
    )


def layer_built(backend: str) -> str:
    """Build a MoE layer over MoRI where AITER is off: what comes of it."""
    build = getattr(layer, "FusedMoE", None) or layer.FusedMoEFactory
    two = SimpleNamespace(rank_in_group=0, world_size=2)
    one = SimpleNamespace(rank_in_group=0, world_size=1)
    doubles: dict[str, Any] = {"get_dp_group": two, "get_ep_group": two, "get_tp_group": one, "get_pcp_group": one}
    doubles |= {"get_tensor_model_parallel_rank": 0, "get_tensor_model_parallel_world_size": 1}
    # What holds the weights: no release has one for a machine that is none in particular. From 0.24.0 it comes too late.
    if hasattr(layer, "FusedMoEMethodBase"):
        doubles["UnquantizedFusedMoEMethod"] = mock.MagicMock(spec=layer.FusedMoEMethodBase)
    vllm_config = VllmConfig(
        parallel_config=ParallelConfig(all2all_backend=backend, enable_expert_parallel=True),
        device_config=DeviceConfig(device="cpu"),
    )
    with contextlib.ExitStack() as stack:
        for module in (layer, moe):
            for name, double in doubles.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, return_value=double))
        stack.enter_context(mock.patch.object(moe.FusedMoEParallelConfig, "make", return_value=parallel(backend)))
        stack.enter_context(set_current_vllm_config(vllm_config))
        try:
            built = build(
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


def lacking() -> dict[str, Any]:
    """What a release without MoRI's expert parallelism says where it is asked for it."""
    try:
        ParallelConfig(all2all_backend="mori", enable_expert_parallel=True)
        backend = "taken"
    except ValueError as error:
        backend = f"{type(error).__name__}: {error}"
    return {
        "backend": backend,
        "prepare": mori_prepare_finalize is not None,
        "experts_ask": hasattr(rocm_aiter_fused_moe.AiterExperts, "expects_unquantized_inputs"),
        "layer_asks": hasattr(layer.FusedMoE, "use_mori_kernels") or hasattr(moe.FusedMoEConfig, "use_mori_kernels"),
    }


def driven() -> dict[str, Any]:
    """What comes of MoRI's expert parallelism."""
    torch.accelerator.empty_cache = lambda: None  # which from 0.20.2 on a workspace that grows asks for
    init_workspace_manager(torch.device("cpu"))
    register_aiter_experts()
    with aiter_on():
        other = moe_config("allgather_reducescatter")
        run = {
            "schemes": {scheme: experts_run(scheme) for scheme in ("none", "tensor", "token", "block")},
            "other_backends": {name: experts_run("block", name) for name in BACKENDS[1:]},
            "spoilt": {spoil.__name__: experts_run("token", spoil=spoil) for spoil in (as_if_unquantised, again)},
            "elsewhere": asks_for_unquantised(aiter_experts("none", other, moe.FUSED_MOE_UNQUANTIZED_CONFIG)),
        }
    parameters = inspect.signature(mori_prepare_finalize.MoriPrepareAndFinalize.prepare).parameters
    return {**run, "prepare_can_defer": "defer_input_quant" in parameters, "layer": layer_built(BACKENDS[0])}


def main() -> None:
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    result = driven() if BACKENDS else {"lacking": lacking()}
    print_result(result, vllm)


if __name__ == "__main__":
    main()
