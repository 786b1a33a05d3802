"""Models with windows, and streaming sessions, at a real LMCache server: whether others are given what was computed."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import importlib.util

import lmcache_stores as driver

SERVER = "lmcache.v1.multiprocess.modules.lmcache_driven_transfer"

CASES: dict[str, tuple[str, tuple[int, ...]]] = {
    "wide": ("a window of two chunks: vLLM has a prompt that LMCache lost", ()),
    "narrow": ("a window of a chunk, half of which vLLM has", ()),
    "several": ("two windows, one less than a chunk", ()),
    "narrow_apart": ("a window of a chunk, half of which vLLM has, the window's group stored apart", ()),
    "behind_apart": ("a window's group stored apart: who needs what vLLM has", ()),
    "kept": ("LMCache lost nothing", (0, 0, 2 * driver.CHUNK, 5 * driver.CHUNK)),
    "whole": ("full attention alone: stored again from what vLLM has", (0, 0, 2 * driver.CHUNK)),
    "drafted": ("a streaming session, whose drafts are rejected", (0, 3 * driver.CHUNK)),
    "undrafted": ("a streaming session", (0, 3 * driver.CHUNK)),
}
"""By the driver's case: what it is, and how many tokens each of its requests gets from LMCache; (): any number may."""


def cases() -> dict[str, str | None]:
    """Each case: who is given KV that is not its tokens', or nothing."""
    came = driver.played(*CASES)
    shared = {name: tokens for name, (_, tokens) in CASES.items()}
    server = importlib.import_module(SERVER) if importlib.util.find_spec(SERVER) is not None else None
    if hasattr(server, "all_null_chunk_masks"):
        shared["behind_apart"] = (0, 0, 2 * driver.CHUNK)
    return {what: _finding(came[name], shared[name]) for name, (what, _) in CASES.items()}


def _finding(came: list[tuple[int, bool]] | str, shared: tuple[int, ...]) -> str | None:
    if isinstance(came, str):
        return came
    wrong = [str(number) for number, (_, right) in enumerate(came, 1) if not right]
    if wrong:
        return f"request number {', '.join(wrong)} of {len(came)} is given KV that is not its tokens'"
    loaded = tuple(tokens for tokens, _ in came)
    return f"of what is stored {loaded} tokens are loaded, not {shared}" if shared and loaded != shared else None
