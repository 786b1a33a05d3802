"""Releases of vLLM and LMCache: which are pinned, what the registries offer, and the modules of each."""
