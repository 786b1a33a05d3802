"""Images are named by their contents where KV leaves the engine, also with both caches off.

vLLM then names them by a counter, and whatever shares KV between engines takes that for their contents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.renderers.base:BaseRenderer._process_mm_uuids"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    def process_mm_uuids(
        original: Callable[..., Any],
        renderer: Any,
        mm_data: Any,
        mm_data_items: Any,
        mm_uuid_items: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Answer what was given where the release makes names: the model's processor hashes images without a name."""
        names = original(mm_data, mm_data_items, mm_uuid_items, *rest, **named)
        config = renderer.config
        if names is mm_uuid_items or (config.kv_transfer_config is None and config.ec_transfer_config is None):
            return names
        renderer._validate_mm_uuids(mm_data, mm_data_items, mm_uuid_items)
        livepatch.count("hashed")
        return mm_uuid_items

    return {TARGET: process_mm_uuids}
