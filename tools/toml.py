"""The standard library's reader of TOML, where it has one: `from vllm_livepatch.tools.toml import tomllib`."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = ["tomllib"]
