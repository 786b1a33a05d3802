# mypy: disable-error-code="import-not-found"
"""A worker's store or load, and what names its tokens, in the form that the LMCache has which is installed."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

CODEC = "lmcache.v1.multiprocess.token_codec"


def packed(tokens: Sequence[int]) -> Any:
    """Tokens as keys have them: a list, or its bytes where this LMCache packs them."""
    if importlib.util.find_spec(CODEC) is None:
        return list(tokens)
    return importlib.import_module(CODEC).pack_token_ids(list(tokens))


def operation(module: Any, tokens: Sequence[int], blocks: Sequence[int], groups: int = 1) -> Any:
    """A store or load of all these tokens, by `LoadStoreOp` of the module of LMCache's worker adapter.

    Each of the engine's groups of layers has these blocks.
    """
    kind = module.LoadStoreOp
    given = {
        "token_ids": list(tokens),
        "token_bytes": packed(tokens),
        "block_ids": [list(blocks) for _ in range(groups)] if hasattr(kind, "flat_block_ids") else list(blocks),
        "start": 0,
        "end": len(tokens),
    }
    return kind(**{field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given})
