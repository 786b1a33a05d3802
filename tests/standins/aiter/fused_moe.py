# mypy: disable-error-code="import-not-found"
"""AITER's fused experts: what is not quantised yet is quantised here, what is must come with its scale."""

from __future__ import annotations

from typing import Any

import torch

import aiter


def fused_moe(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weight: Any,
    topk_ids: Any,
    expert_mask: Any = None,
    activation: Any = aiter.ActivationType.Silu,
    quant_type: Any = aiter.QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: Any = None,
    w2_scale: Any = None,
    a1_scale: Any = None,
    a2_scale: Any = None,
    num_local_tokens: Any = None,
    dtype: Any = None,
    **ignored: Any,
) -> Any:
    """For each token the weighted sum of its experts: (silu(x gate) * (x up)) down. Returns (tokens, hidden)."""
    kind = aiter.QuantType.per_1x128 if quant_type is aiter.QuantType.per_128x128 else quant_type
    tokens = hidden_states
    if kind is not aiter.QuantType.No:
        if tokens.dtype != w1.dtype:
            tokens, a1_scale = aiter.get_hip_quant(kind)(tokens, scale=a1_scale, quant_dtype=w1.dtype)
        assert a1_scale is not None, "a quantised input needs its scale"
        scale = a1_scale if a1_scale.numel() > 1 else a1_scale.view(1, 1)
        values, scales = restored(tokens, scale), restored(torch.ones(tokens.shape), scale)
    else:
        values, scales = tokens.float(), None
    aiter.computed_on.append((values, scales))
    gate_up, down = restored(w1, w1_scale), restored(w2, w2_scale)
    out = torch.zeros(values.shape[0], down.shape[1])
    for row in range(values.shape[0]):
        for expert, weight in zip(topk_ids[row].tolist(), topk_weight[row].tolist(), strict=True):
            gate, up = (gate_up[expert] @ values[row]).chunk(2)
            out[row] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    return out.to(dtype or hidden_states.dtype)


def restored(quantised: Any, scale: Any) -> Any:
    """What was quantised, by a scale for each block of each of its dimensions; None where it was not."""
    values = quantised.float()
    if scale is None:
        return values
    scale = scale.float().view(*scale.shape, *(1,) * (values.dim() - scale.dim()))
    for dimension, size in enumerate(values.shape):
        scale = scale.repeat_interleave(size // scale.shape[dimension], dimension)
    return values * scale
