# mypy: disable-error-code="import-not-found, misc"
"""What a release's own connectors do about sends whose end nobody reports: MoRI-IO's scheduler's side, NIXL's worker.

Either is the release's own, without a peer, an agent or a device. A worker of NIXL's is one without its construction: of
what its steps then ask, anything that is not known here ends as NotBuilt.
"""

from __future__ import annotations

import importlib
import inspect
import os
import queue
import sys
import threading
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

os.environ["VLLM_MORIIO_CONNECTOR_READ_MODE"] = "1"  # where it is no entry of the connector's own configuration

import real_scheduler as real
from result import NotBuilt
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from worlds import Stepping

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
MORIIO = "MoRIIOConnector"
_ADDRESS = "127.0.0.1,handshake:1,notify:1"
DEAD = f"cmpl-___prefill_addr_host:{_ADDRESS}___decode_addr_host:{_ADDRESS}_{'0' * 32}"
"""A request as the router names it, which some releases take the addresses of both engines from."""


class MoRIIOPrefill(Stepping):
    """A scheduler with MoRI-IO's connector of a prefill engine, which decode engines read from. Its time is a number."""

    def __init__(self, scheduler_name: str, model_config: Any) -> None:
        module = KVConnectorFactory._registry[MORIIO]().__module__
        extra = {"read_mode": True, "proxy_ip": "", "proxy_ping_port": 0, "http_port": 0}
        config = real.make_config(scheduler_name, model_config, (module, MORIIO), extra=extra)
        config.kv_transfer_config.kv_role = "kv_producer"
        super().__init__(real.scheduler_of(scheduler_name, config))
        self.now = 0.0
        clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: self.now, "perf_counter": lambda: self.now})
        sys.modules[module].time = clock

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        self.unanswered.append((scheduled, real.run_model(scheduled)))
        if len(self.unanswered) > self.ahead:
            answered, output = self.unanswered.popleft()
            output.kv_connector_output = real.transfers([], [])
            self.scheduler.update_from_output(answered, output)

    def hold(self) -> None:
        """A prompt is computed, and its blocks are kept for a decode engine, of which nothing is heard any more."""
        request = real.make_request(DEAD, tokens=1)
        request.kv_transfer_params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": "tx",
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "remote_handshake_port": 1,
            "remote_notify_port": 1,
            "remote_dp_size": 1,
            "remote_dp_rank": 0,
            "tp_size": 1,
        }
        self.scheduler.add_request(request)
        self.steps(4)
        if not self.holds():
            raise NotBuilt("MoRI-IO's connector keeps no blocks for a decode engine here")

    def holds(self) -> bool:
        return DEAD in self.scheduler.requests


def has_moriio() -> bool:
    """Tell whether the release has MoRI-IO's connector."""
    return MORIIO in KVConnectorFactory._registry


def nixl_worker() -> Any:
    """The class of NIXL's worker that decode engines read from, if they can renew what they wait for; else None."""
    for module, name in (("pull_worker", "NixlPullConnectorWorker"), ("worker", "NixlConnectorWorker")):
        try:
            found = getattr(importlib.import_module(f"{V1}.nixl.{module}"), name, None)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(f"{V1}.nixl"):
                raise
            continue
        if found is not None:
            return found if hasattr(found, "_handle_heartbeat") else None
    return None


class Leases:
    """NIXL's worker of a prefill engine, and what is sent of its requests; `unpatched`: as the release does it."""

    def __init__(self, *, unpatched: bool = False) -> None:
        kind = nixl_worker()

        class Worker(kind):
            def __init__(self) -> None:
                """Without agent and memory."""

            def __getattr__(self, name: str) -> Any:
                raise NotBuilt(f"{kind.__name__}.{name} is not known to the driver")

            def __del__(self) -> None:
                """There is nothing to be taken apart."""

            if unpatched:
                _get_new_notifs = inspect.unwrap(kind._get_new_notifs)

        self.notifications: list[bytes] = []
        self.worker = Worker()
        vars(self.worker).update(
            nixl_wrapper=SimpleNamespace(get_new_notifs=self._heard),
            transfer_topo=SimpleNamespace(tp_ratio=lambda size: 1),
            xfer_stats=MagicMock(),
            tp_rank=0,
            world_size=1,
            consumer_notification_counts_by_req=defaultdict(int),
            expected_consumer_notifications_by_req={},
            use_host_buffer=False,
            use_mla=False,
            enable_permute_local_kv=False,
            enable_heterogeneous_attn_post_process=False,
            _engine_by_address={},
            _failed_recv_reqs=queue.Queue(),
            _failed_remote_engines=set(),
            _handshake_futures={},
            _handshake_lock=threading.RLock(),
            _has_mamba=False,
            _invalid_remote_engines=set(),
            _lease_extension=20.0,
            _recv_failures=set(),
            _recving_metadata={},
            _recving_transfers={},
            _replicated_pcp_done_sending=set(),
            _remote_agents={},
            _reqs_to_process=set(),
            _reqs_to_send={},
        )

    def _heard(self) -> dict[str, list[bytes]]:
        heard, self.notifications = self.notifications, []
        return {"decode": heard} if heard else {}

    def lease(self, name: str, seconds: float) -> None:
        """A request's blocks are kept for so long."""
        self.worker._reqs_to_process.add(name)
        self.worker._reqs_to_send[name] = time.perf_counter() + seconds

    def renewed(self, name: str) -> None:
        """A decode engine lives, and waits for this request."""
        self.notifications.append(f"HB:{name}".encode())

    def read(self, name: str) -> None:
        """A decode engine has read this request."""
        self.notifications.append(f"{name}:1".encode())

    def step(self) -> set[str]:
        """The requests whose blocks come back with a step."""
        worker = self.worker
        if hasattr(type(worker), "get_transfer_results"):
            return set(worker.get_transfer_results().finished_sending or ())
        return set(worker.get_finished()[0])
