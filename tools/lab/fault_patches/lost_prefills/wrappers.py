"""A share of prefill legs is refused, while the other leg may be under way: a fault, for the lab."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

ADD = "vllm.v1.engine.async_llm:AsyncLLM.add_request"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target."""
    share: float = livepatch.options["SHARE"]
    draw = random.Random(livepatch.options["SEED"])
    after: str = livepatch.options["AFTER"]

    def add(
        original: Callable[..., Any], engine: Any, request_id: str, prompt: Any, params: Any, *rest: Any, **named: Any
    ) -> Any:
        transfer = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params") or {}
        if not transfer.get("do_remote_decode") or (after and not Path(after).exists()) or draw.random() >= share:
            return original(request_id, prompt, params, *rest, **named)
        livepatch.count("refused")
        raise livepatch.deliberate(ValueError("a fault of the lab's: this prefill engine does not take the request"))

    return {ADD: add}
