# mypy: disable-error-code="import-not-found"
"""Let one release's real schedulers end requests in all ways, and note how often each end is told to the workers; print JSON."""

from __future__ import annotations

from result import begin_driver, print_result

begin_driver()

from collections import Counter, deque
from typing import Any

import real_scheduler as real
import vllm


def reported(name: str, model_config: Any) -> dict[str, int]:
    """How often the end of each request was told; each is held for its send, and aborted once more while it is held."""
    scheduler = real.make_scheduler(name, model_config, ("connector_double", "ConnectorDouble"))
    ends: Counter[str] = Counter()
    unanswered: deque[tuple[Any, Any]] = deque()

    def step(sending: tuple[str, ...] = ()) -> None:
        """With asynchronous scheduling, one more step is scheduled than was answered."""
        scheduled = scheduler.schedule()
        ends.update(scheduled.finished_req_ids)
        unanswered.append((scheduled, real.run_model(scheduled)))
        if len(unanswered) > (name == "AsyncScheduler"):
            scheduled, output = unanswered.popleft()
            if scheduled.num_scheduled_tokens:
                output.kv_connector_output = real.transfers((), sending)
            scheduler.update_from_output(scheduled, output)

    ids = ("ends by its length", "aborted while it runs", "aborted as it is added", "reset with the cache")
    scheduler.add_request(real.make_request("witness", tokens=150))
    step()
    for request_id in ids:
        scheduler.add_request(real.make_request(request_id, delay_free=True, tokens=3))
        if request_id.startswith("aborted as"):
            real.abort(scheduler, request_id)
        step()
        if request_id.startswith("aborted while"):
            real.abort(scheduler, request_id)
        if request_id.startswith("reset"):
            scheduler.reset_prefix_cache()
        for _ in range(6):
            step()
        if request_id not in scheduler.requests:
            raise AssertionError(f"{request_id} is not held for its send")
        for _ in range(3):
            real.abort(scheduler, request_id)
            step()
        step((request_id,))
        for _ in range(4):
            step()
    return dict(ends)


def main() -> None:
    print_result({"reported": real.with_each_scheduler(reported)}, vllm)


if __name__ == "__main__":
    main()
