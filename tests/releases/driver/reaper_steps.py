"""Time the real scheduler with many live requests, with the reaper and without in turn; print CPU seconds per step.

    reaper_steps.py ROUNDS REQUESTS

Run with the bundle and a release's sources on PYTHONPATH. Of the requests all but a few wait, as under overload; half as
many again have ended and hold blocks that are not due.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import real_scheduler as real

STEPS = 50
TOKENS = 150
METHODS = (
    "finish_requests",
    "_free_request",
    "_free_blocks",
    "add_request",
    "_update_after_schedule",
    "_update_from_kv_xfer_finished",
)


class Load:
    """A scheduler kept busy: whenever a request ends, the next one begins."""

    def __init__(self, model_config: Any, live: int) -> None:
        self.live = live
        self.begun = 0
        connector = ("reaper_connectors", "NixlDouble")
        self.scheduler = real.make_scheduler("Scheduler", model_config, connector)
        self.fill()

    def fill(self) -> None:
        while len(self.scheduler.requests) < self.live:
            self.begun += 1
            request = real.make_request(f"r{self.begun}", delay_free=True, tokens=TOKENS)
            self.scheduler.add_request(request)

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        output = real.run_model(scheduled)
        sent = [name for name in scheduled.finished_req_ids if name in self.scheduler.requests]
        output.kv_connector_output = real.transfers([], sent)
        self.scheduler.update_from_output(scheduled, output)
        self.fill()


def main() -> None:
    rounds, live = int(sys.argv[1]), int(sys.argv[2])
    real.quiet()
    with tempfile.TemporaryDirectory() as directory:
        load = Load(real.make_model_config(Path(directory)), live)
    own = vars(load.scheduler)
    patched = {name: own[name] for name in METHODS}
    watch = own["_livepatch_kv_block_reaper"]
    for number in range(live // 2):  # what ended, and is not due
        watch.holds[f"held{number}"] = time.monotonic()
    times: dict[str, list[float]] = {"stock": [], "patched": []}
    gc.disable()
    for turn in range(rounds + 1):
        for name in ("stock", "patched") if turn % 2 else ("patched", "stock"):
            for method, value in patched.items():
                own.pop(method, None)
                if name == "patched":
                    own[method] = value
            gc.collect()
            begin = time.process_time()
            for _ in range(STEPS):
                load.step()
            if turn:  # the first round warms up
                times[name].append((time.process_time() - begin) / STEPS)
    running = len(load.scheduler.running)
    print_result({"times": times, "live": live, "running": running, "held": len(watch.holds)})


if __name__ == "__main__":
    main()
