"""A pytest plugin, in the engine's environment: the sources on the path are no installation, and so tell no platform."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import torch
import vllm.platforms

if not hasattr(torch._C._cpu, "_is_avx512_supported"):
    torch._C._cpu._is_avx512_supported = lambda: False  # releases to 0.17 ask for it by a name that torch lacks now
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()
