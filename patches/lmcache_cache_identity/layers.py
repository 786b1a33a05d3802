"""LMCache in the engine's process, by layer: the worker's keys carry the tag that the scheduler's lookups have.

With `use_layerwise` LMCache's connector stores and loads without a request's tags. What an adapter computed would be
stored by ids alone, and nothing would ever be found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .in_process import TAG

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]


class Layers:
    """A worker's part of one LMCacheConnectorV1Impl, vLLM's copy or LMCache's own."""

    def __init__(self, impl: Any, livepatch: PatchContext) -> None:
        self.impl = impl
        self.livepatch = livepatch
        self.loading: Iterator[Any] = iter(())
        """The requests of a step that are still to be loaded, in the order in which LMCache loads them."""
        self._stored: tuple[Any, dict[int, Any]] = None, {}
        """A step's metadata, and its requests by their ids' list, which LMCache hands on as it is."""
        engine = impl.lmcache_engine
        for owner, name, wrapper in (
            (impl, "start_load_kv", self.load),
            (engine, "retrieve_layer", self.retrieve),
            (engine, "store_layer", self.store),
        ):
            setattr(owner, name, livepatch.around(getattr(owner, name), livepatch.lasting(wrapper), owner))

    def metadata(self) -> Any:
        return self.impl._parent._get_connector_metadata()

    def load(self, original: Call, _: Any, *rest: Any, **named: Any) -> Any:
        requests = self.metadata().requests
        self.loading = iter([one for one in requests if one.load_spec is not None and one.load_spec.can_load])
        return original(*rest, **named)

    def retrieve(self, original: Call, _: Any, tokens: Any, *rest: Any, **named: Any) -> Any:
        return original(tokens, *rest, **_tagged(named, _first_of(self.loading, tokens)))

    def store(self, original: Call, _: Any, tokens: Any, *rest: Any, **named: Any) -> Any:
        metadata = self.metadata()
        if self._stored[0] is not metadata:
            self._stored = metadata, {id(one.token_ids): one for one in metadata.requests}
        request = self._stored[1].get(id(tokens))
        if request is not None and _is_kept_out(request):
            return itertools.repeat(None)  # a producer would store what its scheduler has taken out
        return original(tokens, *rest, **_tagged(named, request))


def _first_of(requests: Iterable[Any], tokens: Any) -> Any:
    """The next of some requests that begins with these ids."""
    ids = list(tokens)
    return next((one for one in requests if list(one.token_ids[: len(ids)]) == ids), None)


def _is_kept_out(request: Any) -> bool:
    """Whether `InProcess.built` has taken a request's store out of the step."""
    spec = request.save_spec
    return spec is not None and not spec.can_save and spec.skip_leading_tokens >= len(request.token_ids)


def _tagged(named: dict[str, Any], request: Any) -> dict[str, Any]:
    """Arguments with a request's tags, where ours is among them; else as LMCache gave them."""
    tags = getattr(request, "request_configs", None) or {}
    return {**named, "request_configs": tags} if TAG in tags else named
