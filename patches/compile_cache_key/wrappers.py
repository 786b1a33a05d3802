"""What patches make of traced code is a factor of vLLM's compile-cache keys.

Source: vllm.compilation.backends and .caching, which both ask `vllm.envs.compile_factors`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

FACTORS = "vllm.envs:compile_factors"
FILENAME = "vllm.model_executor.models.registry:_LazyRegisteredModel._get_cache_filename"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target."""

    alone = uuid.uuid4().hex

    def key() -> str:
        """What patches make of traced code; where that is not known, a key that nobody else has.

        Stock's own key would give this process the graphs of stock code, and stock processes those of ours.
        """
        if not livepatch.aside:
            try:
                return livepatch.patch_set()
            except Exception as error:
                livepatch.stand_aside("the patch set", error)
        return alone

    def factors(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        found = original(*rest, **named)
        patch_set = key()
        if patch_set:
            livepatch.count("keys")
            found["LIVEPATCH_PATCH_SET"] = patch_set
        return found

    def filename(original: Callable[..., Any], instance: Any, *rest: Any, **named: Any) -> Any:
        name: str = original(*rest, **named)
        patch_set = key()
        return f"{name.removesuffix('.json')}-{patch_set[:16]}.json" if patch_set else name

    return {FACTORS: livepatch.lasting(factors), FILENAME: livepatch.lasting(filename)}
