# mypy: disable-error-code="import-not-found"
"""Let one older LMCache's real server know a worker, and nothing come from it for ten days; print whether it knows it then.

The server is started by the release's own `run_cache_server`, and asked over its own queue. What it would keep on a device and in
pinned memory is a double; its clocks are set forward.
"""

from __future__ import annotations

from result import begin_driver, print_result

begin_driver()

import importlib
import inspect
import os
import sys
import time
from typing import Any
from unittest.mock import MagicMock

import native_double

native_double.stand_in()
sys.modules["cupy"] = native_double.NativeDouble("cupy")

import lmcache
import prometheus_client
import torch

native_double.device_ops(lmcache)
from lmcache_server import PATIENCE
from ports import free_port

WORKER = 4711
TEN_DAYS = 10 * 24 * 3600.0
MP = "lmcache.v1.multiprocess"
CONTEXTS = ("gpu_contexts", "_gpu_contexts", "_cache_contexts")
DOUBLES = ("StorageManager", "GPUCacheContext", "get_layout_desc")


def started(port: int) -> Any:
    """The engine of a server that serves."""
    server = importlib.import_module(f"{MP}.server")
    for name, module in list(sys.modules.items()):
        if name.startswith(MP):
            for double in DOUBLES:
                if hasattr(module, double):
                    setattr(module, double, MagicMock())
    torch.cuda.init = lambda: None
    prometheus_client.start_http_server = MagicMock()  # on a port of its own choice, for everybody
    sys.argv = [
        "lmcache",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--l1-size-gb",
        "0.1",
        "--eviction-policy",
        "LRU",
    ]
    args = server.parse_args()
    configs = {
        "mp_config": "parse_args_to_mp_server_config",
        "storage_manager_config": "parse_args_to_config",
        "prometheus_config": "parse_args_to_prometheus_config",
        "telemetry_config": "parse_args_to_telemetry_config",
        "obs_config": "parse_args_to_observability_config",
    }
    known: dict[str, Any] = {**vars(args), "return_engine": True, "start_prometheus_http_server": False}
    wanted = inspect.signature(server.run_cache_server).parameters
    given = {name: getattr(server, configs[name])(args) if name in configs else known[name] for name in wanted}
    return server.run_cache_server(**given)[1]


def transfers(engine: Any) -> Any:
    """What keeps the workers: the engine itself, from 0.4.6 on one of its modules."""
    modules = getattr(engine, "_modules", [engine])
    (found,) = [one for one in modules if hasattr(one, "register_kv_cache")]
    return found


def known(keeper: Any) -> list[int]:
    """The workers that it knows, under whatever name the release keeps them."""
    return list(next(getattr(keeper, name) for name in CONTEXTS if hasattr(keeper, name)))


def asked(port: int) -> Any:
    """An answer of the server, over its own queue."""
    import zmq

    queue, protocol = importlib.import_module(f"{MP}.mq"), importlib.import_module(f"{MP}.protocol")
    client = queue.MessageQueueClient(f"tcp://127.0.0.1:{port}", zmq.Context.instance())
    kind = protocol.RequestType.GET_CHUNK_SIZE
    return client.submit_request(kind, [], protocol.get_response_class(kind)).result(timeout=PATIENCE)


def main() -> None:
    vllm = importlib.import_module("vllm")
    port = free_port()
    keeper = transfers(started(port))
    others = len(inspect.signature(keeper.register_kv_cache).parameters) - 1
    keeper.register_kv_cache(WORKER, *[MagicMock() for _ in range(others)])
    before = known(keeper)
    monotonic, since_1970 = time.monotonic, time.time
    time.monotonic, time.time = lambda: monotonic() + TEN_DAYS, lambda: since_1970() + TEN_DAYS
    answers = [asked(port) for _ in range(2)]
    print_result({"cases": {"before": before, "after": known(keeper), "answers": answers}}, lmcache, vllm)
    os._exit(0)  # the server's threads go on


if __name__ == "__main__":
    main()
