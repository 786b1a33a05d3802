"""Events of a GPU count as done where vLLM runs on a CPU: no fault, the lab cannot run without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker"
TARGET = f"{MODULE}:MooncakeStoreWorker.register_kv_caches"


class Done:
    """An event of a stream that has nothing to do."""

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class OnCpu:
    """torch, as the worker's module sees it."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.cuda = SimpleNamespace(Event=Done)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target."""

    def register(original: Callable[..., Any], worker: Any, *rest: Any, **named: Any) -> Any:
        module = vars(sys.modules[MODULE])
        platform = sys.modules["vllm.platforms"].current_platform
        if platform.is_cpu() and not isinstance(module["torch"], OnCpu):
            module["torch"] = OnCpu(module["torch"])
            livepatch.count("on_cpu")
        return original(*rest, **named)

    return {TARGET: register}
