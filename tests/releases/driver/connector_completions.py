# mypy: disable-error-code="import-not-found"
"""Let one release's real KV connectors report what becomes of a load whose request is aborted; print it as one JSON object.

What runs is the release's own code that answers the scheduler (`request_finished`, `update_connector_output`) and that
tells it of completions (the worker's `get_finished`). What to expect of which release is none of this script's business.

    connector_completions.py [own]     with the argument, LMCache's own connector instead of vLLM's
"""

from __future__ import annotations

from result import all_attempted, attempted, begin_driver, print_result

begin_driver()

import logging
import sys
from collections.abc import Callable
from typing import Any

import lmcache
import native_double
import vllm
from completion_connectors import (
    hf3fs,
    mooncake,
    moriio_write,
    nixl_pull,
    nixl_push_lease,
    nixl_sends,
    offloading,
    simple_cpu_offload,
)
from completion_lmcache import lmcache_own, vllm_lmcache_mp
from completion_passing import moriio_changes, multis


def main() -> None:
    native_double.stand_in()
    logging.disable(logging.CRITICAL)
    if sys.argv[1:] == ["own"]:
        came = attempted(lmcache_own)
    else:
        cases: dict[str, Callable[[], Any]] = {
            "lmcache_mp": vllm_lmcache_mp,
            "nixl_pull": nixl_pull,
            "nixl_sends": nixl_sends,
            "nixl_push_lease": nixl_push_lease,
            "mooncake": mooncake,
            "mooncake_fails": lambda: mooncake(fails=True),
            "moriio_write": moriio_write,
            "moriio_changes": moriio_changes,
            "offloading": offloading,
            "offloading_stored": lambda: offloading(stored=True),
            "simple_cpu_offload": simple_cpu_offload,
            "hf3fs": hf3fs,
            "multi": multis,
        }
        came = all_attempted(cases)
    print_result({"cases": came}, vllm, lmcache)


if __name__ == "__main__":
    main()
