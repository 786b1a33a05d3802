# mypy: disable-error-code="import-not-found"
"""Name images as the API processes of a release's engines do, and let two engines with these names share an LMCache server.

Real are the release's `_process_multimodal`, scheduler and connector, and LMCache's server. Stood in for are the processor
of a model, which would hash pixels and make tensors of them, and the workers. What came is printed as one JSON object.
"""

from __future__ import annotations

from result import begin_driver, leave, print_result

begin_driver()

import os
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import vllm
import vllm.multimodal.parse as parse  # before the renderers: 0.18.1 has a circle
from vllm.renderers.base import BaseRenderer
from vllm.utils.counter import AtomicCounter


class Api(BaseRenderer):  # type: ignore[misc]
    """The renderer of an API process that has just begun; `cached` is whether the engine has a prefix cache."""

    def __init__(self, cached: bool = False, connector: str = "kv_transfer_config") -> None:
        self.given: list[Any] = []
        model_config = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0))
        self.config = SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=cached),
            model_config=model_config,
            **{name: name == connector or None for name in ("kv_transfer_config", "ec_transfer_config")},
        )
        self.model_config = model_config
        self.api_process_rank = 0
        self._mm_req_counter = AtomicCounter()
        self._mm_timing_registry = SimpleNamespace(get=lambda name: None)
        self.mm_processor = None  # has no cache
        self._mm_processor_cache = self._mm_processor_only_cache = self._mm_cache_stats = None
        self.processor = SimpleNamespace(
            info=SimpleNamespace(parse_mm_data=parsed), apply=lambda inputs, timing: self.given.append(inputs)
        )

    def get_mm_processor(self) -> Any:
        return self.processor

    def _drain_mm_cache_invalidations(self) -> None:
        pass

    def names(self, *items: Any, given: Sequence[str | None] = (), kind: str = "image") -> list[Any]:
        """What the items of one request are named; None is what is to be hashed."""
        options = {"mm_uuids": {kind: list(given)} if given else None, "mm_processor_kwargs": None}
        code = BaseRenderer._process_multimodal
        if "tokenization_kwargs" in code.__code__.co_varnames:
            options["tokenization_kwargs"] = None
        code(self, [1], {kind: list(items)}, **options)
        uuids = self.given[-1].mm_uuid_items.get(kind)
        return list(uuids) if uuids is not None else [None] * len(items)


Api.__abstractmethods__ = frozenset()
ITEMS = {"image": parse.ImageProcessorItems, "video": parse.VideoProcessorItems}


def parsed(data: Mapping[str, Sequence[Any]]) -> Any:
    """As the release parses it, but for the modalities whose items it takes apart."""
    return parse.MultiModalDataItems({kind: ITEMS[kind](items) for kind, items in data.items()})


def answered() -> list[list[Any]]:
    """Two engines, each with an image that is the first of its API process; then the second engine with the first's image.

    Of each: how many tokens came from LMCache, and whether they are of the image that was sent.
    """
    import lmcache_identity as identity
    import real_scheduler as real

    identity.PLAYED[0] = "lmcache"
    made, left_by = real.make_config, identity.left_by
    pictures: dict[str, str] = {}

    def make_config(*args: Any, **named: Any) -> Any:
        config = made(*args, **named)
        config.cache_config.enable_prefix_caching = False
        return config

    def left(request: Any, *rest: Any) -> Any:
        """The KV of a prompt with an image is told by what is on it, not by its name."""
        names = [one.identifier for one in request.mm_features]
        for one in request.mm_features:
            one.identifier = pictures[request.request_id]
        try:
            return left_by(request, *rest)
        finally:
            for one, name in zip(request.mm_features, names, strict=True):
                one.identifier = name

    real.make_config, identity.left_by = make_config, left
    server = identity.Server()
    try:
        first, second = (identity.Engine(server, adapters=False) for _ in range(2))
        apis = {first: Api(), second: Api()}
        came = []
        for engine, picture in ((first, "a cat"), (second, "a dog"), (second, "a cat")):
            request = identity.request(image=apis[engine].names(picture)[0], prompt=31)
            pictures[request.request_id] = picture
            came.append(list(engine.run(request)))
        return came
    finally:
        server.kill()


def main() -> None:
    came = answered()
    print_result({"pid": os.getpid(), "came": came}, vllm, sys.modules["lmcache"])
    leave()


if __name__ == "__main__":
    main()
