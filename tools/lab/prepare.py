"""Fetch ahead what the tests need: the engine's environment and the pinned sources, side by side, with progress."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_livepatch.tools.lab import environments, topology
from vllm_livepatch.tools.lab.options import VLLM
from vllm_livepatch.tools.releases import registry, sources

INSPECT = """
from vllm.model_executor.models.registry import ModelRegistry
ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
"""
"""What an engine does of the lab's model when it starts, unless it was done before."""


def inspect_model(python: Path, vllm: str) -> None:
    """Have the environment's release keep what its engines want to know of the lab's model."""
    environ = topology.environment(python, environments.vllm_cache(vllm))
    subprocess.run([str(python), "-c", INSPECT], env=environ, stdout=subprocess.DEVNULL, check=True)


def main() -> None:
    begin = time.monotonic()
    pins = [pin for package in ("vllm", "lmcache") for pin in registry.pins(package)]
    with ThreadPoolExecutor(max_workers=5) as pool:
        engine, router = pool.submit(environments.engine), pool.submit(environments.router)
        injectors = pool.submit(environments.injectors)
        fetched = [pool.submit(sources.site_packages, pin.package, pin.version) for pin in pins]
        for future in fetched:
            future.result()
        print(f"the sources of {len(pins)} releases: {time.monotonic() - begin:.0f} s", file=sys.stderr)
        router.result()
        injectors.result()
        python = engine.result()
        environments.nixl(python)
        environments.ray(python)
        try:
            environments.mooncake(python)
        except environments.InstallationError as error:  # Debian's archive may be out of reach
            print(f"without Mooncake's engine, so its tests are skipped: {error}", file=sys.stderr)
        inspect_model(python, VLLM)
    print(f"all that the tests need is here: {time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
