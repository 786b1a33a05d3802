"""Compile-cache keys where it cannot be told what patches make of traced code."""

from __future__ import annotations

from typing import Any

from vllm_livepatch.patches.compile_cache_key import wrappers
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext


def test_the_key_is_nobody_elses() -> None:
    """Neither stock's nor another process's: graphs of other code would run."""
    keys = []
    for _ in range(2):
        failed: list[str] = []

        def patch_set() -> str:
            raise RuntimeError("it broke")

        context = PatchContext("compile-cache-key", {}, {}, lambda: None, patch_set, failed=failed.append)
        made = wrappers.wrappers(context)

        def factors() -> dict[str, Any]:
            return {"stock": 1}

        asked = guard.in_place_of(factors, made[wrappers.FACTORS], context, "vllm.envs:compile_factors")
        first, second = asked(), asked()
        assert first == second, "the same in the life of a process"
        assert first.pop("stock") == 1
        keys.append(first["LIVEPATCH_PATCH_SET"])
        named = guard.in_place_of(lambda _: "model.json", made[wrappers.FILENAME], context, wrappers.FILENAME)
        assert named("a model") == f"model-{keys[-1][:16]}.json"
        (message,) = failed
        assert "RuntimeError: it broke" in message
    assert len(set(keys)) == 2
