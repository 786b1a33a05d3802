"""Time the real scheduler under healthy load, patched and stock in turn in one process; print CPU seconds per step.

Run with the bundle and a release's sources on PYTHONPATH: the stock method is the one that the wrapper wraps. Every
request's life has both kinds of completion, each valid, as a deployment without a fault has them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULT = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

import real_scheduler as real

TOKENS = 40
STEPS = 100


class Load:
    """A scheduler kept busy: whenever a request ends, the next one begins."""

    def __init__(self, model_config: Any, running: int) -> None:
        self.running = running
        self.scheduler = real.make_scheduler("Scheduler", model_config, ("connector_double", "ConnectorDouble"))
        self.begun = 0

    def step(self) -> None:
        requests = self.scheduler.requests
        while len(requests) < self.running:
            self.begun += 1
            request = real.make_request(f"r{self.begun}", load=True, delay_free=True, tokens=TOKENS)
            self.scheduler.add_request(request)
        scheduled = self.scheduler.schedule()
        output = real.run_model(scheduled)
        waiting = [name for name, item in requests.items() if real.status_name(item) == "WAITING_FOR_REMOTE_KVS"]
        loaded = [name for name in waiting if name not in self.scheduler.finished_recving_kv_req_ids]
        sent = [name for name, item in requests.items() if item.is_finished()]
        output.kv_connector_output = real.transfers(loaded, sent)
        self.scheduler.update_from_output(scheduled, output)


def main() -> None:
    rounds = int(sys.argv[1])
    real.quiet()
    method = "_update_from_kv_xfer_finished"
    patched = vars(real.Scheduler)[method]
    stock = patched.__wrapped__
    with tempfile.TemporaryDirectory() as directory:
        load = Load(real.make_model_config(Path(directory)), running=int(sys.argv[2]))
    times: dict[str, list[float]] = {"stock": [], "patched": []}
    gc.disable()
    for turn in range(rounds + 1):
        for name in ("stock", "patched") if turn % 2 else ("patched", "stock"):
            setattr(real.Scheduler, method, stock if name == "stock" else patched)
            gc.collect()
            begin = time.process_time()
            for _ in range(STEPS):
                load.step()
            if turn:  # the first round warms up
                times[name].append((time.process_time() - begin) / STEPS)
    print(json.dumps({"times": times, "requests": load.begun}), file=RESULT, flush=True)


if __name__ == "__main__":
    main()
