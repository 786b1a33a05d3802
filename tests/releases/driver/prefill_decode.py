"""Drive what prefill/decode disaggregation asks of one release: NIXL agents, request ids. Print one JSON object.

Run with NIXL, the release's sources, and the bundle or not, on the path. One process for both because importing a
release takes a third of the time. What to expect of which release is none of this script's business.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import time

from result import begin_driver, leave, print_result

STARTED = time.perf_counter()
begin_driver()

import gc
import os
import tempfile
from pathlib import Path

import torch
import vllm.platforms

if not hasattr(torch._C._cpu, "_is_avx512_supported"):
    torch._C._cpu._is_avx512_supported = lambda: False  # 0.17 asks for it by a name that later releases of torch lack
# The sources on the path are no installation, and so tell no platform.
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()

import nixl_agents
import real_scheduler as real
import request_ids
import reused_ids

gc.enable()


def main() -> None:
    """Play both parts."""
    real.quiet()
    imported = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        ids = {**request_ids.play(model_config), **reused_ids.play(model_config)}
        agents = nixl_agents.play(model_config, Path(directory))
    seconds = {"import": imported - STARTED, "cases": time.perf_counter() - imported}
    print_result({"pid": os.getpid(), "ids": ids, "agents": agents, "seconds": seconds}, vllm)
    leave()


if __name__ == "__main__":
    main()
