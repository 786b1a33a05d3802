# mypy: disable-error-code="import-not-found"
"""Time the wait for MoRI-IO's transfers, patched and stock in turn in one process; print seconds as one JSON object.

Run with the bundle, a release's sources and the stand-in for mori on PYTHONPATH: the stock method is the one that the
wrapper wraps. Arguments: how many rounds, how many transfers.
"""

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from mori.io import StatusCode, TransferStatus
from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_connector
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_engine import MoRIIOWrapper

TRANSFER_SECONDS = 0.05
"""How long the transfers take that are waited for."""
PENDING_SECONDS = 3.0


def waited(wait: Callable[[Any], None], number: int, seconds: float) -> tuple[float, float]:
    """Seconds, and this thread's seconds on the processor, of a wait for transfers that end at once after `seconds`."""
    engine = MoRIIOWrapper()
    statuses = [TransferStatus() for _ in range(number)]
    engine.transfer_status = list(statuses)

    def complete() -> None:
        for status in statuses:
            status.end(StatusCode.SUCCESS)

    timer = threading.Timer(seconds, complete)
    if not seconds:
        complete()
    begin, busy = time.perf_counter(), time.thread_time()
    if seconds:
        timer.start()
    wait(engine)
    return time.perf_counter() - begin, time.thread_time() - busy


def main() -> None:
    rounds, number = int(sys.argv[1]), int(sys.argv[2])
    stock = vars(MoRIIOWrapper)["waiting_for_transfer_complete"].__wrapped__
    ways: dict[str, Callable[[Any], None]] = {
        "stock": stock,
        "patched": lambda engine: engine.waiting_for_transfer_complete(),
    }
    times: dict[str, dict[str, list[float]]] = {}
    for kind, seconds in (("ended", 0.0), ("under way", TRANSFER_SECONDS)):
        times[kind] = {"stock": [], "patched": []}
        for turn in range(rounds + 1):
            for way in ("stock", "patched") if turn % 2 else ("patched", "stock"):
                wall, _ = waited(ways[way], number, seconds)
                if turn:  # the first round warms up
                    times[kind][way].append(wall)
    wall, busy = waited(ways["patched"], number, PENDING_SECONDS)
    result = {"times": times, "busy": busy / wall, "module": moriio_connector.__file__}
    print_result(result)


if __name__ == "__main__":
    main()
