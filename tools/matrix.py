"""`matrix`: every patch against every pinned release."""
from __future__ import annotations
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.tools import sources
def tree_of(package: str, version: str) -> installed.Tree:
    return installed.Tree([str(sources.site_packages(package, version))])
