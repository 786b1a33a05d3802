"""Time the real scheduler under healthy load, patched and stock in turn in one process; print CPU seconds per step.

Run with the bundle and a release's sources on PYTHONPATH. All methods that a patch wraps change places with those of
stock, which are what is wrapped; each kind drives a scheduler of its own, so that neither meets what the other left. In
each round both are made anew: two of the same kind differ by some per cent, by where their objects lie in memory.
Every request's life has both kinds of completion, each valid, as a deployment without a fault has them.
"""

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import gc
import inspect
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import real_scheduler as real
from _vllm_livepatch.sitecustomize import guard

OURS = str(Path(guard.__file__).parents[1])
TOKENS = 40
STEPS = 50
WARM_STEPS = 50


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


def is_stock(function: Any) -> bool:
    return not function.__code__.co_filename.startswith(OURS)


def main() -> None:
    rounds = int(sys.argv[1])
    real.quiet()
    functions = {name: value for name, value in vars(real.Scheduler).items() if inspect.isfunction(value)}
    patched = {name: function for name, function in functions.items() if not is_stock(function)}
    stock = {name: inspect.unwrap(function, stop=is_stock) for name, function in patched.items()}
    methods = {"stock": stock, "patched": patched}
    times: dict[str, list[float]] = {"stock": [], "patched": []}
    begun = 0
    gc.disable()
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        for turn in range(rounds + 1):
            loads: dict[str, Load] = {}
            spent: dict[str, list[float]] = {"stock": [], "patched": []}
            gc.collect()
            for part in range(5):
                for name in ("stock", "patched") if (turn + part) % 2 else ("patched", "stock"):
                    for method, function in methods[name].items():
                        setattr(real.Scheduler, method, function)
                    if not part:  # made and warmed up
                        loads[name] = Load(model_config, running=int(sys.argv[2]))
                    begin = time.process_time()
                    for _ in range(STEPS if part else WARM_STEPS):
                        loads[name].step()
                    if part:
                        spent[name].append((time.process_time() - begin) / STEPS)
            begun += sum(load.begun for load in loads.values())
            for name in times if turn else ():  # the first round warms up
                times[name].append(statistics.median(spent[name]))
    print_result({"times": times, "requests": begun, "wrapped": sorted(patched)})


if __name__ == "__main__":
    main()
