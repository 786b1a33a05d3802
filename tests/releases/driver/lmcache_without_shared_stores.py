# mypy: disable-error-code="import-not-found"
"""Ask one LMCache what its server reserves for a store that a worker will fill itself; print it as one JSON object.

The server's module and its requests are the release's, and its answer where it has one. What to expect of which release is
none of this script's business.
"""

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import importlib
import sys
from typing import Any
from unittest.mock import MagicMock

import native_double

native_double.stand_in()
sys.modules["cupy"] = native_double.NativeDouble("cupy")

import lmcache

native_double.device_ops(lmcache)

MP = "lmcache.v1.multiprocess"
TRANSFERS = {"engine_driven_transfer": "EngineDrivenTransferModule", "non_gpu_transfer": "NonGPUTransferModule"}
"""The module that serves workers which copy themselves, by its names."""


def transfers() -> Any:
    """That module's class, or None where the release has none."""
    for name, kind in TRANSFERS.items():
        module = f"{MP}.modules.{name}"
        try:
            return getattr(importlib.import_module(module), kind)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise  # it is there, and lacks something else
    return None


def main() -> None:
    importlib.import_module(f"{MP}.server")
    requests = importlib.import_module(f"{MP}.protocol").RequestType.__members__
    result: dict[str, Any] = {"asked": "PREPARE_STORE" in requests, "serves": None}
    serving = transfers()
    if serving is not None:
        server = MagicMock()
        module = serving(server)
        result["serves"] = serving.__name__
        result["keeps_what_is_reserved"] = hasattr(module, "_pending_shm_writes")
        if not result["keeps_what_is_reserved"]:
            answer = module.prepare_store(MagicMock(), 1)
            result["answer"], result["reserves"] = answer.context, server.storage_manager.reserve_write.called
    print_result(result, lmcache)


if __name__ == "__main__":
    main()
