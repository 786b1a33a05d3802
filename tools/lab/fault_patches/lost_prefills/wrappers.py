"""A share of prefill legs is refused, while the other leg may be under way: a fault, for the lab."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

ADD = "vllm.v1.engine.async_llm:AsyncLLM.add_request"
PARAMS = 2
"""Where a request's sampling parameters are among the positional arguments; its id and its prompt stand before."""


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target, in wrapt's form (wrapped, instance, args, kwargs)."""
    share: float = livepatch.options["SHARE"]
    draw = random.Random(livepatch.options["SEED"])
    after: str = livepatch.options["AFTER"]

    def add(wrapped: Callable[..., Any], engine: Any, args: Any, kwargs: Any) -> Any:
        params = args[PARAMS] if len(args) > PARAMS else kwargs["params"]
        transfer = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params") or {}
        if not transfer.get("do_remote_decode") or (after and not Path(after).exists()) or draw.random() >= share:
            return wrapped(*args, **kwargs)
        livepatch.count("refused")
        raise livepatch.deliberate(ValueError("a fault of the lab's: this prefill engine does not take the request"))

    return {ADD: add}
