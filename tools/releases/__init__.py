"""Releases of vLLM and LMCache: which are pinned, what the registries offer, and the modules of each."""

from collections.abc import Sequence

PACKAGES = ("vllm", "lmcache")
"""What this project is about, whether or not the patches at hand are for both."""


def span(versions: Sequence[str]) -> str:
    """Releases next to each other, as people write them: 0.28.0 to 0.30.0."""
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}" if versions else "none"
