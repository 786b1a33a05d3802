"""LMCache's worker says once of each request that all its stores have ended, also of one whose id was used before.

The worker keeps one future for each id: a second store takes the first one's place, and a store that has ended speaks
for the one that is under way. The scheduler then frees blocks that the server still reads. And it keeps the ids that it
has reported for ever: a request whose id was used before is never reported, and its blocks never come back.

Source: docs/connector-completions.md, "LMCache's own connector".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter:LMCacheMPWorkerAdapter"


class Stores:
    """Two stores of one request, in place of the later one's future; either may stand for two itself.

    The first one's event is kept with it: a device's event lives on in other processes only while its maker keeps it.
    """

    __slots__ = ("event", "futures")

    def __init__(self, first: Any, second: Any, event: Any) -> None:
        self.futures = (first, second)
        self.event = event

    def query(self) -> bool:
        return all(future.query() for future in self.futures)

    def result(self, *args: Any, **kwargs: Any) -> bool:
        return all(future.result(*args, **kwargs) for future in self.futures)


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    def submit_store_request(wrapped: Call, adapter: Any, args: Any, kwargs: Any) -> Any:
        request_id = args[0] if args else kwargs["request_id"]
        stores = adapter.store_futures
        before = stores.get(request_id)
        event = getattr(adapter, "store_events", {}).get(request_id)
        result = wrapped(*args, **kwargs)
        begun = stores.get(request_id)
        if begun is not None and begun is not before:
            if request_id in adapter.finished_stores:
                livepatch.count("store_after_another")
                adapter.finished_stores.discard(request_id)
            if before is not None:
                livepatch.count("store_beside_another")
                stores[request_id] = Stores(before, begun, event)
        return result

    def get_finished(wrapped: Call, adapter: Any, args: Any, kwargs: Any) -> Any:
        # The engine tells the end of each request once: an id that it tells again is another request's.
        getattr(adapter, "_returned_finished", set()).clear()
        return wrapped(*args, **kwargs)

    return {f"{ADAPTER}.submit_store_request": submit_store_request, f"{ADAPTER}.get_finished": get_finished}
