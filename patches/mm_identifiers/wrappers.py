"""Images that vLLM does not hash are named so that no other engine's have the same name.

Their names are taken for their contents by whatever shares KV between engines.
"""

from __future__ import annotations

import os
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
        mm_req_id: str,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Make the text unique of which the release makes names where it hashes nothing."""
        config = renderer.config
        transfers = config.kv_transfer_config
        if transfers is not None and transfers.kv_role == "kv_both" and config.ec_transfer_config is None:
            mm_req_id = f"{mm_req_id}-{os.urandom(8).hex()}"  # not kept: processes fork
            names = original(mm_data, mm_data_items, mm_uuid_items, mm_req_id, *rest, **named)
            if names is not mm_uuid_items:
                livepatch.count("named")
            return names
        return original(mm_data, mm_data_items, mm_uuid_items, mm_req_id, *rest, **named)

    return {TARGET: process_mm_uuids}
