# mypy: disable-error-code="import-not-found"
"""A stand-in for the part of AITER's interface that vLLM's MoRI expert parallelism uses, since tests lack its GPUs.

It quantises for real, to FP8 in plain torch, and keeps a record of it for the tests: `quantised` names the type of each
tensor that was quantised, in order; `computed_on` has what each call of the experts computed on, and its scales.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

quantised: list[str] = []
computed_on: list[tuple[Any, Any]] = []
"""The tokens' values (rows), restored where they were quantised, and what each was scaled by, or None."""

Quantise = Callable[..., tuple[Any, Any]]


class QuantType(enum.Enum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


class ActivationType(enum.Enum):
    No = -1
    Silu = 0
    Gelu = 1


def get_hip_quant(kind: QuantType) -> Quantise:
    """The function that quantises activations (rows of tokens) in one way."""

    def quantise(tokens: Any, scale: Any = None, quant_dtype: Any = None, **ignored: Any) -> tuple[Any, Any]:
        quantised.append(str(tokens.dtype))
        rows, size = tokens.shape
        groups = (
            tokens.float().view(rows, -1, 128) if kind is QuantType.per_1x128 else tokens.float().view(rows, 1, size)
        )
        if kind is QuantType.per_Tensor:
            scales = scale.float().view(1, 1, 1) if scale is not None else tensor_scale(groups, quant_dtype)
        else:
            scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-6) / torch.finfo(quant_dtype).max
        given = scales.view(-1) if kind is QuantType.per_Tensor else scales.view(rows, -1)
        return (groups / scales).to(quant_dtype).view(rows, size), given

    return quantise


def tensor_scale(values: Any, dtype: Any) -> Any:
    return values.abs().max().clamp(min=1e-6).view(1, 1, 1) / torch.finfo(dtype).max
