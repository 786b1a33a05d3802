"""SimpleCPUOffloadConnector copies by torch where vLLM runs on a CPU: no fault, the lab cannot run without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

PACKAGE = "vllm.v1.simple_kv_offload"
TARGET = f"{PACKAGE}.worker:SimpleCPUOffloadWorker.register_kv_caches"


class Done:
    """An event of a stream that has nothing to do."""

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Stream:
    """A stream that has nothing to do."""

    def __init__(self, **_: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Cuda:
    Stream = Stream
    current_stream = Stream


class OnCpu:
    """torch, as the modules of the worker see it."""

    Event = Done
    cuda = _Cuda

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def paired(sources: Mapping[str, Any], targets: Mapping[str, Any], *_: Any, **__: Any) -> list[tuple[Any, Any]]:
    """The regions to copy between, each of shape [blocks, ...], one of a layer or more."""
    return [(source, targets[name]) for name, source in sources.items()]


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of the one target."""

    def copy(sources: Sequence[int], targets: Sequence[int], regions: list[tuple[Any, Any]]) -> None:
        for source, target in regions:
            target[list(targets)] = source[list(sources)]

    def register(original: Callable[..., Any], worker: Any, *rest: Any, **named: Any) -> Any:
        if sys.modules["vllm.platforms"].current_platform.is_cpu():
            for name in ("worker", "copy_backend"):
                module = vars(sys.modules[f"{PACKAGE}.{name}"])
                if not isinstance(module["torch"], OnCpu):
                    module["torch"] = OnCpu(module["torch"])
            module |= {"build_params": paired, "copy_blocks": copy}
            livepatch.count("on_cpu")
        return original(*rest, **named)

    return {TARGET: register}
