"""A decode engine hears of a share of its requests late: a fault, for the lab."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

ADD = "vllm.v1.engine.async_llm:AsyncLLM.add_request"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target."""
    seconds: float = livepatch.options["SECONDS"]
    share: float = livepatch.options["SHARE"]
    draw = random.Random(livepatch.options["SEED"])

    def add(
        original: Callable[..., Any], engine: Any, request_id: str, prompt: Any, params: Any, *rest: Any, **named: Any
    ) -> Any:
        transfer = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params") or {}
        if not transfer.get("do_remote_prefill") or draw.random() >= share:
            return original(request_id, prompt, params, *rest, **named)

        async def late() -> Any:
            livepatch.count("late")
            await asyncio.sleep(seconds)
            return await original(request_id, prompt, params, *rest, **named)

        return late()

    return {ADD: add}
