"""Let leases on a release's real NIXL worker run out behind one that a decode engine renews; print what is let go.

Both workers are the release's own, with agents of the real NIXL on CPU memory; the renewal is the release's own
notification. `reaper_leases.py PATIENCE`: how many seconds to wait for what stock never lets go.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import lease_guard as leases  # its first lines are this driver's too

# isort: split
import inspect
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nixl_agents
import real_scheduler as real
import vllm.platforms
from lease_guard import PORT, Side, Story
from result import leave, print_result, until

PATIENCE = float(sys.argv[1])
LEASE = 0.2
"""Seconds. A renewal makes it the release's own, 20 s."""


def renew(story: Story, request_id: str) -> None:
    """Decode says that it lives, and waits for this request; prefill has heard it."""
    metadata = story.decode.metadata()
    info = vars(sys.modules[type(metadata).__module__])["HeartbeatInfo"]
    given = {"req_ids": {request_id}, "host": "127.0.0.1", "port": PORT, "tp_size": 1, "dcp_size": 1, "pp_size": 1}
    known = {name: given[name] for name in inspect.signature(info).parameters if name in given}
    metadata.heartbeat_by_engine = {story.prefill.engine_id: info(**known)}
    story.decode.worker.start_load_kv(metadata)
    worker = story.prefill.worker

    def renewed() -> bool:
        worker._get_new_notifs()
        return bool(worker._reqs_to_send[request_id] > time.perf_counter() + 10)

    until(renewed)


def behind_a_renewed_one(story: Story) -> dict[str, Any]:
    """Of two leases the first is renewed, and the second ends: its decode engine is dead."""
    story.prefilled("p-lives", [3, 4], lease=600.0)
    story.prefilled("p-dead", [5, 6], lease=LEASE)
    worker = story.prefill.worker
    worker._reqs_to_send["p-lives"] = worker._reqs_to_send["p-dead"]
    renew(story, "p-lives")
    until(lambda: time.perf_counter() > worker._reqs_to_send["p-dead"])
    sent: set[str] = set()
    latest = time.monotonic() + PATIENCE
    while "p-dead" not in sent and time.monotonic() < latest:
        sent |= story.prefill.ended()[0]
    story.begin("d-lives", "p-lives", [3, 4])
    read = story.received("d-lives", [3, 4])
    return {"let_go": sorted(sent), "contents": read["contents"], "was_notified": story.was_notified("p-lives")}


def main() -> None:
    real.quiet()
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        nixl_agents.begin_distributed(model_config, Path(directory) / "rendezvous")
        leases.look_at_the_release(model_config)
        prefill = Side(model_config)
        prefill.listen()
        story = Story(prefill, Side(model_config))
        assert leases.in_time(story)["was_notified"], "they know each other"
        result = {"behind_a_renewed_one": behind_a_renewed_one(story)}
    print_result({"pid": os.getpid(), "cases": result}, vllm)
    leave()


if __name__ == "__main__":
    main()
