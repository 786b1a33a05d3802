# mypy: disable-error-code="import-not-found"
"""Drive the real scheduler to the end of some requests and print, as JSON, what each step scheduled and what is left.

The arguments are methods of it, which are also pickled as Ray and vLLM do it.
"""

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import sys
import tempfile
from pathlib import Path

import cloudpickle
import real_scheduler as real
import vllm

STEPS = 12

real.quiet()
with tempfile.TemporaryDirectory() as directory:
    model_config = real.make_model_config(Path(directory))
    scheduler = real.make_scheduler("AsyncScheduler", model_config, ("connector_double", "ConnectorDouble"))
free = real.free_blocks(scheduler)
for number in range(3):
    scheduler.add_request(real.make_request(f"r{number}", load=number == 1, delay_free=number == 2, tokens=5))
steps = []
for _ in range(STEPS):
    scheduled = scheduler.schedule()
    steps.append(dict(scheduled.num_scheduled_tokens))
    output = real.run_model(scheduled)
    waiting = [name for name, item in scheduler.requests.items() if real.status_name(item) == "WAITING_FOR_REMOTE_KVS"]
    loaded = [name for name in waiting if name not in scheduler.finished_recving_kv_req_ids]
    sent = [name for name, item in scheduler.requests.items() if item.is_finished()]
    output.kv_connector_output = real.transfers(loaded, sent)
    scheduler.update_from_output(scheduled, output)
result = {
    "steps": steps,
    "left": sorted(scheduler.requests),
    "free again": real.free_blocks(scheduler) == free,
    # By reference, as what it stands for: else these were the code, and the bundle's at that.
    "cloudpickled": [cloudpickle.dumps(getattr(real.Scheduler, name)).hex() for name in sys.argv[1:]],
}
print_result(result, vllm)
