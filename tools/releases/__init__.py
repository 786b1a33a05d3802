"""Releases of vLLM and LMCache: which are pinned, what the registries offer, and the modules of each."""

PACKAGES = ("vllm", "lmcache")
"""What this project is about, whether or not the patches at hand are for both."""
