"""Under MoRI kernels, AITER's experts take inputs that are quantised already: MoRI quantises them for the way.

Source: vllm PR#37418.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

_MOE = "vllm.model_executor.layers.fused_moe"


class _Built(threading.local):
    """The MoE layer that this thread is building without AITER, if it may."""

    layer: Any = None


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target."""
    allow_without_aiter: bool = livepatch.options["ALLOW_WITHOUT_AITER"]
    built = _Built()

    def expects_unquantized_inputs(original: Callable[..., Any], experts: Any, *rest: Any, **named: Any) -> Any:
        return original(*rest, **named) and not experts.moe_config.use_mori_kernels

    def build_layer(original: Callable[..., Any], layer: Any, *rest: Any, **named: Any) -> Any:
        if not allow_without_aiter:
            return original(*rest, **named)
        outer, built.layer = built.layer, layer
        try:
            return original(*rest, **named)
        finally:
            built.layer = outer

    def use_mori_kernels(original: Callable[..., Any], instance: Any, *rest: Any, **named: Any) -> Any:
        # While a layer is built, this is read only to assert that AITER is on, and that its shared experts are not,
        # which they cannot be without it.
        used = original(*rest, **named)
        if used and built.layer is not None and not built.layer.rocm_aiter_fmoe_enabled:
            livepatch.tell(
                "built_without_aiter", "an MoE layer over MoRI is built without AITER, as ALLOW_WITHOUT_AITER asks"
            )
            return False
        return used

    return {
        f"{_MOE}.rocm_aiter_fused_moe:AiterExperts.expects_unquantized_inputs": expects_unquantized_inputs,
        f"{_MOE}.layer:FusedMoE.__init__": build_layer,
        f"{_MOE}.layer:FusedMoE.use_mori_kernels": use_mori_kernels,
        f"{_MOE}.config:FusedMoEConfig.use_mori_kernels": use_mori_kernels,
    }
