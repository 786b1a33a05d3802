"""The bootstrap server names a prefill engine once all of its workers have registered, which they do one by one.

Who asks before that takes those that it is given for all of them, and keeps them: it asks these alone for KV, and takes
the part that they write for the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

GROUPS = "vllm.distributed.parallel_state"


async def known(livepatch: PatchContext, release: Callable[[], Any]) -> Mapping[Any, Any]:
    """The engines of which all workers are known, of those that the release names."""
    engines: Mapping[Any, Any] = await release()
    try:
        ranks, stages = sizes()
        whole = {rank: engine for rank, engine in engines.items() if is_whole(engine.worker_addr, ranks, stages)}
    except Exception as error:
        livepatch.stand_aside("naming engines", error)
        return engines
    if len(whole) < len(engines):
        livepatch.count("not_whole", len(engines) - len(whole))
    return whole


def sizes() -> tuple[int, int]:
    """How many ranks and stages an engine has: this server is in the process of one of its workers."""
    groups = vars(sys.modules[GROUPS])
    if groups["_TP"] is None or groups["_PP"] is None:
        return 1, 1  # it stands alone
    return groups["_TP"].world_size, groups["_PP"].world_size


def is_whole(workers: Mapping[int, Mapping[int, str]], ranks: int, stages: int) -> bool:
    return len(workers) >= ranks and all(len(of) >= stages for of in workers.values())
