"""A worker has a random number at LMCache's server, as from LMCache 0.5.0 on, and not its process's.

To 0.4.7 the number is the process's, and containers count their processes from 1 each. The server takes the second
worker of a number for the first: its loads are written into the first one's blocks, and its stores read from there.

Source: LMCache PR#3231, PR#3631, PR#3718.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "lmcache.integration.vllm.vllm_multi_process_adapter:LMCacheMPWorkerAdapter.__init__"

BITS = 63
"""Of a number. LMCache's messages hold signed integers of 64 bits."""


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """The wrapper of the one target."""

    def init(_: None, adapter: Any, *rest: Any, **named: Any) -> None:
        # Nothing was registered yet: the connector registers its caches later.
        if adapter.instance_id == os.getpid():
            adapter.instance_id = secrets.randbits(BITS)
            livepatch.count("numbered")

    return {TARGET: livepatch.after(init)}
