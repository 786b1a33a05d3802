# mypy: disable-error-code="import-not-found, misc"
"""A backend of the OffloadingConnector whose memory has contents, and whose transfers fail when they are told to.

It stands in for what copies bytes, for which no machine here has the device. The manager is the release's own for CPU memory.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

BLOCKS = 40
"""Blocks, or chunks of one block, that the backend holds."""

LOST = object()
"""What a transfer that failed leaves behind."""

by_handlers = hasattr(OffloadingSpec, "get_handlers")  # to 0.24.0; later a spec gives its worker
ours = "vllm.v1.kv_offload.worker.worker" if by_handlers else "vllm.v1.kv_offload.base"
base = importlib.import_module(ours)
Interface: Any = base.OffloadingHandler if by_handlers else base.OffloadingWorker


class Mover(Interface):
    """Moves blocks between `device` and `host`, each a dictionary of contents by block. A transfer ends when it was asked
    `patience` times what has ended, and once more; or when it is waited for."""

    def __init__(self) -> None:
        self.device: dict[int, tuple[Any, ...]] = {}
        self.host: dict[int, tuple[Any, ...]] = {}
        self.plan: dict[str, str] = {}
        """What becomes of the next `load` or `store`: `refused`, `raises`, `failed`."""
        self.under_way: dict[int, tuple[str, list[int], list[int], str, int]] = {}
        self.asked = 0
        self.patience = 1
        self.waited_for: list[str] = []

    def transfer_async(self, job_id: int, spec: Any) -> bool:
        source, target = spec
        if isinstance(source, GPULoadStoreSpec):
            return self.submit_store(job_id, source, target)
        return self.submit_load(job_id, source, target)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.begin("store", job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self.begin("load", job_id, src_spec, dst_spec)

    def begin(self, kind: str, job: int, source: Any, target: Any) -> bool:
        fate = self.plan.pop(kind, "well")
        if fate == "raises":
            raise RuntimeError("the device is gone")
        if fate == "refused":
            return False
        self.under_way[job] = (kind, ids(source), ids(target), fate, self.asked)
        return True

    def get_finished(self) -> list[Any]:
        self.asked += 1
        return [
            self.end(job) for job, (*_, asked) in list(self.under_way.items()) if asked < self.asked - self.patience
        ]

    def wait(self, job_ids: set[int]) -> None:
        for job in job_ids & self.under_way.keys():
            kind, sources, targets, fate, _ = self.under_way[job]
            self.waited_for.append(fate)
            self.under_way[job] = (kind, sources, targets, fate, -self.patience)
            self.move(job)

    def end(self, job: int) -> Any:
        self.move(job)
        return base.TransferResult(job_id=job, success=self.under_way.pop(job)[3] == "well")

    def move(self, job: int) -> None:
        kind, sources, targets, fate, _ = self.under_way[job]
        here, there = (self.device, self.host) if kind == "store" else (self.host, self.device)
        for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if fate == "well":
                there[target] = here[source]
            elif number == 0:  # a failed one has written something
                there[target] = (LOST,)
        self.under_way[job] = (kind, [], [], fate, self.under_way[job][4])


def ids(spec: Any) -> list[int]:
    """The blocks of a source or target."""
    found = spec.block_ids if hasattr(spec, "block_ids") else spec.chunk_ids
    return [int(block) for block in found]


class Spec(OffloadingSpec):
    """The release's manager of CPU memory, of BLOCKS blocks, and `Mover` in the place of its worker."""

    def __init__(self, *config: Any) -> None:
        super().__init__(*config)
        self.mover = Mover()

    def get_manager(self) -> Any:
        return CPUOffloadingManager(BLOCKS)

    def get_handlers(self, kv_caches: Any, *_: Any) -> Iterator[tuple[Any, Any, Any]]:
        yield GPULoadStoreSpec, CPULoadStoreSpec, self.mover
        yield CPULoadStoreSpec, GPULoadStoreSpec, self.mover

    def get_worker(self, kv_caches: Any) -> Any:
        return self.mover


class Tiered(Spec):
    """The same behind the release's manager of several tiers, with its own example of a second one."""

    def get_manager(self) -> Any:
        tiering, example = (importlib.import_module(f"{TIERING}.{name}manager") for name in ("", "example."))
        memory = memoryview(bytearray(BLOCKS)).cast("B", (BLOCKS, 1))
        primary = tiering.CPUPrimaryTierOffloadingManager(
            BLOCKS, mmap_region=SimpleNamespace(create_kv_memoryview=lambda: memory)
        )
        second = example.ExampleSecondaryTierManager(self, memory, "example")
        return tiering.TieringOffloadingManager(primary, [second])


TIERING = "vllm.v1.kv_offload.tiering"
tiers = importlib.util.find_spec(TIERING) is not None and importlib.util.find_spec(f"{TIERING}.example") is not None
"""Whether the release has these."""


def begin(worker: Any) -> Mover:
    """Let a worker of the connector get its backend as when the KV caches are registered; the backend."""
    (worker._register_handlers if by_handlers else worker._init_worker)(None)
    mover: Mover = worker.spec.mover
    return mover
