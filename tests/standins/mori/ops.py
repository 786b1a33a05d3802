# mypy: disable-error-code="import-not-found"
"""The interface of `mori.ops` as expert parallelism uses it, for a group of one rank: what is dispatched comes back."""

from __future__ import annotations

from typing import Any


class EpDispatchCombineOp:
    def dispatch(self, tokens: Any, weights: Any, scales: Any, indices: Any) -> tuple[Any, Any, Any, Any, Any]:
        """The tokens (rows), their weights, scales and experts as received, and how many were received."""
        import torch

        return tokens, weights, scales, indices, torch.tensor([tokens.shape[0]], dtype=torch.int32)

    def combine(self, tokens: Any, weights: Any, indices: Any) -> tuple[Any, Any]:
        return tokens, None
