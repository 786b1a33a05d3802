# mypy: disable-error-code="import-not-found"
"""Loads for NIXL's push workers: registrations that wait, prefill hosts that come, pairs of engines that come and go.

The workers are a release's own, with agents of the real NIXL; the drivers of the release tests make and step them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nixl_agents
import push_costs
import push_failures

from tests.scale.ours import Operations


def push(model_config: Any, *, pending: int, hosts: int, pairs: int) -> dict[str, Any]:
    """One write; registrations that wait; one prefill engine by many hosts' names; pairs that begin, write and end."""
    push_costs.HOSTS, push_costs.PAIRS, push_failures.SECONDS = hosts, pairs, 0.3
    with tempfile.TemporaryDirectory() as directory:
        nixl_agents.begin_distributed(model_config, Path(directory) / "rendezvous")
        story = push_failures.Story(push_failures.Side(model_config), push_failures.Side(model_config))
        ends = {"pushed": push_costs.push_one(story, "first")}
        story.prefill.expire_all()
        operations = [registrations(story, number) for number in (pending, 2 * pending)]
        grown = {f"{name} for more hosts": more for name, more in push_costs.hosts(story).items()}
        for name, left in push_costs.ends(model_config).items():
            grown[f"{name} of pairs that ended"] = left[-1]
    return {"ends": ends, "operations": operations, "grown": grown}


def registrations(story: Any, number: int) -> dict[str, int]:
    """Decode registers so many requests that prefill has not computed."""
    agent, worker, sent = story.decode.worker.nixl_wrapper, story.prefill.worker, []
    before, agent.send_notif = agent.send_notif, lambda name, notif_msg: sent.append(notif_msg)
    with Operations() as operations:
        for request_id in (f"waits {number}-{each}" for each in range(number)):
            story.decode.worker._do_send_reg_notif(request_id, push_costs.registration(story, request_id))
            worker._handle_push_reg_notif(sent.pop())
    agent.send_notif = before
    worker._pending_d_registrations.clear()
    return dict(operations.counted)
