"""Images are named by their contents where KV leaves the engine, also with both caches off.

vLLM then names them by a counter, and whatever shares KV between engines takes that for their contents.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.renderers.base:BaseRenderer._process_mm_uuids"


def decoded(item: Any) -> Any:
    """What the model is to see of an item: two videos may be of one file, and an image's file may have made-up fields.

    Raises whatever the libraries raise that read it.
    """
    if hasattr(item, "original_bytes"):
        item = item.media
    if isinstance(item, (list, tuple)):
        return [decoded(one) for one in item]
    if isinstance(item, Mapping):
        return {name: decoded(one) for name, one in item.items()}
    if hasattr(item, "getpalette"):
        return {"mode": item.mode, "size": item.size, "palette": item.getpalette(), "data": item.tobytes()}
    return item


def digest(item: Any) -> str:
    """64 hexadecimal digits, by the release's own serializer. Raises as `decoded` does."""
    hasher = importlib.import_module("vllm.multimodal.hasher").MultiModalHasher
    found = hashlib.sha256()
    for chunk in hasher.iter_item_to_bytes("item", decoded(item)):
        found.update(memoryview(chunk).nbytes.to_bytes(8, "little"))
        found.update(chunk)
    return found.hexdigest()


def by_contents(items: Any, given: Any, names: Any) -> list[Any]:
    """The names of one modality: a user's, where the release kept it, else a digest. Raises as `decoded` does."""
    kept = {one for one in given or () if isinstance(one, str)}
    about = items.metadata if isinstance(getattr(items, "metadata", None), list) else [None] * len(names)
    return [
        name if item is None or name in kept else digest([item, of_it])
        for item, of_it, name in zip(items.get_all_items_for_hash(), about, names, strict=True)
    ]


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    def process_mm_uuids(
        original: Callable[..., Any],
        renderer: Any,
        mm_data: Any,
        mm_data_items: Any,
        mm_uuid_items: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        names = original(mm_data, mm_data_items, mm_uuid_items, *rest, **named)
        config = renderer.config
        if names is mm_uuid_items or (config.kv_transfer_config is None and config.ec_transfer_config is None):
            return names
        try:
            parsed = {kind: names[kind] for kind in names if kind in mm_data_items}
            found = {kind: by_contents(mm_data_items[kind], mm_uuid_items.get(kind), parsed[kind]) for kind in parsed}
        except Exception:  # of a file that a client sent: the model's processor is the one to refuse it
            livepatch.count("left")
            return names
        livepatch.count("hashed")
        return {**names, **found}

    return {TARGET: process_mm_uuids}
