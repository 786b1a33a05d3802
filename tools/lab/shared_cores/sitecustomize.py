"""For engines that share a small machine's cores, in every setup alike; no part of any bundle.

Of four engines on two cores one that decoded fell to 1.4 tokens a second, and leases ran out while their renewals
waited. Four causes. On CPU memory the NIXL connector binds its worker's first thread to the last core of each NUMA
node (base_worker.py), the same for all engines. NIXL's agents poll without a pause; upstream has no setting for it.
So does whoever waits for a write of Mooncake's. And an engine waits for its worker by giving up the core over and over
(vLLM's shm_broadcast.py): beside a busy thread Linux 6.18 then gives it 0.4 % of that core. So here nobody is bound,
and who waits sleeps for 100 us.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MICROSECONDS = 100
AT_ONCE = 16
"""Parts of one write of Mooncake's."""


def _unbound(process: int, cores: Iterable[int]) -> None:
    return None


def _wait() -> None:
    time.sleep(MICROSECONDS / 1e6)


class _Transports:
    """Changes NIXL's bindings and Mooncake's engine when they are loaded."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        bindings = name.startswith("nixl") and name.endswith("._bindings")
        change = _nixl if bindings else _mooncake if name == "mooncake.engine" else None
        spec = PathFinder.find_spec(name, path, target) if change else None
        if spec is not None and spec.loader is not None and change is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                change(vars(module))

            vars(spec.loader)["exec_module"] = load_and_change
        return spec


def _nixl(module: dict[str, Any]) -> None:
    """Agents rest between two polls."""
    agent = module["nixlAgent"]

    def made(name: str, config: Any) -> Any:
        config.pthrDelay = MICROSECONDS
        return agent(name, config)

    module["nixlAgent"] = made


def _mooncake(module: dict[str, Any]) -> None:
    """Who waits for a write rests between two looks; like the release's, it answers at the first part that failed."""

    def write(engine: Any, target: str, sources: list[int], places: list[int], lengths: list[int]) -> int:
        left = list(zip(sources, places, lengths, strict=True))[::-1]
        under_way: list[int] = []
        while left or under_way:
            # Each is a connection: of hundreds at once some stand still until they are given up.
            while left and len(under_way) < AT_ONCE:
                under_way.append(engine.transfer_submit_write(target, *left.pop()))
            states = [-1 if part < 0 else engine.transfer_check_status(part) for part in under_way]
            if min(states) < 0:
                return -1
            under_way = [part for part, state in zip(under_way, states, strict=True) if not state]
            if under_way:
                _wait()
        return 0

    module["TransferEngine"].batch_transfer_sync_write = write


vars(os).update(sched_setaffinity=_unbound, sched_yield=_wait)
sys.meta_path.insert(0, _Transports)
