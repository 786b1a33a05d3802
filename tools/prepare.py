"""Fetch ahead what the tests need: the engine's environment and the pinned sources, side by side, with progress."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from vllm_livepatch.tools import environments, registry, sources

OTHER_VLLM = "0.29.0"
"""Of the engine tests, beside the environment's own."""


def main() -> None:
    begin = time.monotonic()
    pins = [pin for package in ("vllm", "lmcache") for pin in registry.pins(package)]
    with ThreadPoolExecutor(max_workers=5) as pool:
        engine, router = pool.submit(environments.engine), pool.submit(environments.router)
        fetched = [pool.submit(sources.site_packages, pin.package, pin.version) for pin in pins]
        for future in fetched:
            future.result()
        print(f"the sources of {len(pins)} releases: {time.monotonic() - begin:.0f} s", file=sys.stderr)
        router.result()
        python = engine.result()
        environments.other_vllm(python, OTHER_VLLM)
        environments.nixl(python)
    print(f"all that the tests need is here: {time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
