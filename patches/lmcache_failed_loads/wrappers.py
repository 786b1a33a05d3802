"""LMCache's worker reports the blocks of a load that failed, so that nobody computes on what they held before.

To 0.5.4 the worker logs a load that the server refused or could not carry out, and says that it has ended, as it does
of one that succeeded. Blocks are reported as failed only where the server was found gone; to 0.4.7, of a load that is
not begun for that reason, the end is never reported.

Source: docs/connector-completions.md, "What LMCache's worker waits for"; mended upstream in 0.5.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import attached

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter:LMCacheMPWorkerAdapter"

REFUSED = "_livepatch_refused_loads"
"""Attribute of a worker's adapter: the requests whose load was not begun, and whose end is to be reported."""


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    def submit_retrieve_request(
        original: Call, adapter: Any, request_id: str, op: Any, *rest: Any, **named: Any
    ) -> Any:
        result = original(request_id, op, *rest, **named)
        begun = adapter.retrieve_futures.get(request_id)
        if begun is None:
            if not hasattr(adapter, "_dropped_retrieves"):  # to 0.4.7, which forgets the load
                attached(adapter, REFUSED, set[str]).add(request_id)
        elif not isinstance(begun, tuple):  # to 0.4.1, which keeps the future without the blocks
            begun.livepatch_blocks = list(op.block_ids)
        return result

    def get_finished(original: Call, adapter: Any, *rest: Any, **named: Any) -> Any:
        under_way = dict(adapter.retrieve_futures)
        sent, ended = result = original(*rest, **named)
        # To 0.4.1 the adapter has no such set: vLLM's connector is given it by `failed-loads`.
        failed: set[int] = vars(adapter).setdefault("error_block_ids", set())
        for request_id in under_way.keys() & (ended or ()):
            begun = under_way[request_id]
            future, blocks = begun if isinstance(begun, tuple) else (begun, begun.livepatch_blocks)
            # Of a load that is given up since the server is gone, the blocks are reported already, and no result comes.
            if not failed.issuperset(blocks) and not future.result():
                livepatch.count("failed")
                failed.update(blocks)
        refused = vars(adapter).pop(REFUSED, None)
        if not refused:
            return result
        livepatch.count("refused", len(refused))
        return sent, refused.union(ended or ())

    return {
        f"{ADAPTER}.submit_retrieve_request": submit_retrieve_request,
        f"{ADAPTER}.get_finished": get_finished,
        f"{ADAPTER}.get_finished_with_lazy_offload": get_finished,
    }
