"""LMCache's worker says once of each request that all its stores have ended, also of one whose id was used before.

The worker keeps one future for each id: a second store takes the first one's place, and a store that has ended speaks
for the one that is under way. The scheduler then frees blocks that the server still reads. And it keeps the ids that it
has reported for ever: a request whose id was used before is never reported, and its blocks never come back.

Source: docs/connector-completions.md, "LMCache's own connector".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter:LMCacheMPWorkerAdapter"


class Stores:
    """The stores of one request that are under way, in place of the newest one's future.

    A long prompt is stored in thousands of steps, and its stores may all be under way at once: they stand in one row.
    Each store's event is kept until that store has ended: a device's event lives on in other processes only while its
    maker keeps it. The newest store's event is kept by the worker.
    """

    __slots__ = ("earlier", "newest", "succeeded")

    def __init__(self, first: Any) -> None:
        self.earlier: deque[tuple[Any, Any]] = deque()
        self.newest = first
        self.succeeded = True

    def add(self, future: Any, event: Any) -> None:
        """Add a store that has begun. `event` is the one of the store before it, None where there is none."""
        self.earlier.append((self.newest, event))
        self.newest = future

    def query(self) -> bool:
        """Return whether all stores have ended. Raises what the newest store's future raises, as without the patch."""
        while self.earlier and self._first_ended():
            self.earlier.popleft()
        return not self.earlier and bool(self.newest.query())

    def result(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether all stores succeeded. The adapter asks for this once `query` has answered True."""
        return bool(self.newest.result(*args, **kwargs)) and self.succeeded

    def _first_ended(self) -> bool:
        future, _ = self.earlier[0]
        try:
            ended = bool(future.query())
            if ended and not future.result():
                self.succeeded = False
        except Exception:  # the original never asks an earlier store again, so its error must not end the step
            self.succeeded = False
            return True
        return ended


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    def submit_store_request(original: Call, adapter: Any, request_id: str, *rest: Any, **named: Any) -> Any:
        stores = adapter.store_futures
        before = stores.get(request_id)
        event = getattr(adapter, "store_events", {}).get(request_id)
        result = original(request_id, *rest, **named)
        begun = stores.get(request_id)
        if begun is not None and begun is not before:
            if request_id in adapter.finished_stores:
                livepatch.count("store_after_another")
                adapter.finished_stores.discard(request_id)
            if before is not None:
                livepatch.count("store_beside_another")
                together = before if isinstance(before, Stores) else Stores(before)
                together.add(begun, event)
                stores[request_id] = together
        return result

    def get_finished(original: Call, adapter: Any, *rest: Any, **named: Any) -> Any:
        # The engine tells the end of each request once: an id that it tells again is another request's.
        getattr(adapter, "_returned_finished", set()).clear()
        return original(*rest, **named)

    return {f"{ADAPTER}.submit_store_request": submit_store_request, f"{ADAPTER}.get_finished": get_finished}
