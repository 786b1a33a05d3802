"""For engines that share a small machine's cores, in every arm alike; no part of any bundle.

Of four engines on two cores one that decoded fell to 1.4 tokens a second, and leases ran out while their renewals
waited. Three causes. On CPU memory the NIXL connector binds its worker's first thread to the last core of each NUMA
node (base_worker.py), the same for all engines. NIXL's agents poll without a pause; upstream has no setting for it.
And an engine waits for its worker by giving up the core over and over (vLLM's shm_broadcast.py): beside a busy thread
Linux 6.18 then gives it 0.4 % of that core. So here nobody is bound, and who waits sleeps for 100 us.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MICROSECONDS = 100


def _unbound(process: int, cores: Iterable[int]) -> None:
    return None


def _wait() -> None:
    time.sleep(MICROSECONDS / 1e6)


class _Nixl:
    """Has the agents of NIXL's Python interface rest between two polls, from the moment its bindings are loaded."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        bindings = name.startswith("nixl") and name.endswith("._bindings")
        spec = PathFinder.find_spec(name, path, target) if bindings else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                vars(module)["nixlAgent"] = _resting(vars(module)["nixlAgent"])

            vars(spec.loader)["exec_module"] = load_and_change
        return spec


def _resting(agent: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    def made(name: str, config: Any) -> Any:
        config.pthrDelay = MICROSECONDS
        return agent(name, config)

    return made


vars(os).update(sched_setaffinity=_unbound, sched_yield=_wait)
sys.meta_path.insert(0, _Nixl)
