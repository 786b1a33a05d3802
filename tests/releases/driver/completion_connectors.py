# mypy: disable-error-code="import-not-found"
"""vLLM's connectors that load asynchronously, LMCache's aside: what each says of an aborted load."""

from __future__ import annotations

import asyncio
import queue
import re
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from completion_world import ID, Load, bare, found, play, reported, request, source_of


class NixlAgent:
    """In place of NIXL's agent: transfers that end when told to."""

    def __init__(self) -> None:
        self.state: dict[int, str] = defaultdict(lambda: "PROC")
        self.notifications: list[bytes] = []

    def check_xfer_state(self, handle: int) -> str:
        return self.state[handle]

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        passed, self.notifications = self.notifications, []
        return {"peer": passed}

    def get_xfer_telemetry(self, handle: int) -> Any:
        return MagicMock()

    def release_xfer_handle(self, handle: int) -> None: ...


def nixl_pull_worker() -> type:
    """The class that reads; to 0.23 the only one."""
    worker_class: type = found("NixlPullConnectorWorker", "nixl.pull_worker") or found(
        "NixlConnectorWorker", "nixl.worker", "nixl_connector"
    )
    return worker_class


def nixl_worker(agent: NixlAgent, worker_class: type) -> Any:
    topology = MagicMock()
    topology.block_size_ratio.return_value = topology.block_size_ratio_from_engine_id.return_value = 1
    topology.get_engine_info.return_value = SimpleNamespace(remote_block_size=16, remote_physical_blocks_per_logical=1)
    topology.tp_ratio.return_value = 1
    failed_is_queue = re.search(r"_failed_recv_reqs(: [^=\n]+)? = queue", source_of(worker_class))
    given: dict[str, Any] = dict.fromkeys(("transfer_topo", "kv_topo"), topology)
    given |= dict.fromkeys(("use_host_buffer", "use_mla", "enable_permute_local_kv", "_has_mamba"), False)
    given |= {"enable_heterogeneous_attn_post_process": False, "_is_hma_required": False, "world_size": 1, "tp_rank": 0}
    given |= {name: {} for name in ("_recving_metadata", "_reqs_to_send", "_remote_agents", "_pending_recv_notifs")}
    given |= {name: {} for name in ("_handshake_futures", "_engine_by_address", "_invalid_engine_backoff")}
    given |= {name: set() for name in ("_reqs_to_process", "_recv_failures", "_replicated_pcp_done_sending")}
    given |= {name: set() for name in ("_failed_remote_engines", "_invalid_remote_engines", "_invalid_block_ids")}
    given |= {name: defaultdict(int) for name in ("consumer_notification_counts_by_req",)}
    given |= {"expected_consumer_notifications_by_req": {}, "_physical_blocks_per_logical_kv_block": 1}
    given |= {"_recving_transfers": defaultdict(list), "nixl_wrapper": agent, "xfer_stats": MagicMock()}
    given |= {"_failed_recv_reqs": queue.Queue() if failed_is_queue else set(), "_handshake_lock": threading.RLock()}
    given |= {"_group_spec_types": [], "_engine_last_active": {}}
    # Of the one that writes.
    given |= {"_push_writer_wake": threading.Event(), "_sending_transfers_lock": threading.Lock()}
    given |= {"_sending_transfers": {}, "_evict_finished_inbox": queue.Queue(), "_send_failures": set()}
    given |= {"_pending_completion_notifs": queue.Queue()}
    return bare(worker_class, **given)


def nixl_scheduler() -> Any:
    scheduler_class = found("NixlPullConnectorScheduler", "nixl.pull_scheduler") or found(
        "NixlConnectorScheduler", "nixl.scheduler", "nixl_connector"
    )
    given: dict[str, Any] = {name: {} for name in ("_reqs_need_recv", "_reqs_need_send", "_reqs_need_save")}
    given |= {"_reqs_not_processed": set(), "is_bidirectional_kv_xfer_enabled": False, "_heartbeat_by_engine": {}}
    given |= {"_heartbeat_req_engine": {}, "_stop_heartbeat": lambda request_id: None}
    return bare(scheduler_class, **given)


def nixl_pull() -> dict[str, Any]:
    def load() -> Load:
        agent = NixlAgent()
        worker, scheduler = nixl_worker(agent, nixl_pull_worker()), nixl_scheduler()
        worker._recving_transfers[ID] = [1, 2]  # one read of each of two remote ranks
        remote = SimpleNamespace(engine_id="peer", block_ids=[[1]])
        worker._recving_metadata[ID] = SimpleNamespace(
            remote=remote, local_block_ids=[[1]], local_physical_block_ids=[[1]], region_blocks_to_zero=None
        )
        agent.state[1] = "DONE"  # one has ended, the other writes
        # What update_state_after_alloc left of the parameters: the prefill is no longer to be asked for.
        ended = request(do_remote_prefill=False, remote_block_ids=[1])
        return Load(
            lambda: agent.state.update({2: "DONE"}),
            lambda: bool(scheduler.request_finished(ended, [[1]])[0]),
            lambda ids: worker.get_finished(),
        )

    return play(load)


def nixl_sends() -> dict[str, list[str]]:
    """An announced send: the reader says that it has read, its lease runs out, or does so behind one that has not."""
    result: dict[str, list[str]] = {}
    for case in ("notified", "lease", "lease_behind_another"):
        agent = NixlAgent()
        worker = nixl_worker(agent, nixl_pull_worker())
        leases = {ID: float("inf") if case == "notified" else 0.0}
        if case == "lease_behind_another":
            leases = {"another": float("inf"), **leases}
        worker._reqs_to_send.update(leases)
        worker._reqs_to_process.update(leases)
        if case == "notified":
            agent.notifications.append(f"{ID}:1".encode())
        result[case] = [reported(worker.get_finished()) for _ in range(2)]
    return result


def nixl_push_lease() -> list[str] | None:
    """An announced send whose lease runs out while the write is under way, which then ends."""
    worker_class = found("NixlPushConnectorWorker", "nixl.push_worker")
    if worker_class is None:
        return None
    agent = NixlAgent()
    worker = nixl_worker(agent, worker_class)
    worker._reqs_to_send[ID] = 0.0
    worker._reqs_to_process.add(ID)
    worker._sending_transfers[ID] = [1]
    reports = [reported(worker.get_finished())]
    agent.state[1] = "DONE"
    return [*reports, *(reported(worker.get_finished()) for _ in range(2))]


def hf3fs() -> dict[str, Any] | None:
    sys.modules.setdefault("orjson", MagicMock())  # its metadata server's, of which nothing runs
    connector_class = found("HF3FSKVConnector", "hf3fs.hf3fs_connector")
    if connector_class is None:
        return None
    manager_class = found("AsyncOperationManager", "hf3fs.hf3fs_connector")

    def load() -> Load:
        future: Future[None] = Future()
        manager = bare(manager_class, _save_futures={}, _load_futures={ID: future}, _pending_finished_requests=set())
        connector = bare(connector_class, _async_manager=manager)
        return Load(
            lambda: future.set_result(None),
            lambda: connector.request_finished(request(), [1])[0],
            connector.get_finished,
        )

    return play(load)


def offloading(*, stored: bool = False) -> dict[str, Any]:
    """A load from the host; `stored`: with a store of the same request under way, as one has that was preempted."""
    worker_class = found("OffloadingConnectorWorker", "offloading.worker", "offloading_connector")
    scheduler_class = found("OffloadingConnectorScheduler", "offloading.scheduler", "offloading_connector")
    by_job = "_load_jobs" in source_of(worker_class)
    LOAD, STORE = 1, 2

    def load() -> Load:
        ended: list[int] = []
        results = "transfer_result.job_id" in source_of(worker_class)

        def get_finished() -> list[Any]:
            done, ended[:] = list(ended), []
            if not results:
                return [(job, True) for job in done]
            empty = {"transfer_time": None, "transfer_size": None, "transfer_type": None}
            return [SimpleNamespace(job_id=job, success=True, **empty) for job in done]

        given: dict[str, Any] = {"worker": SimpleNamespace(get_finished=get_finished)}
        given |= {"kv_connector_stats": MagicMock(), "_connector_worker_meta": MagicMock()}
        if by_job:
            given |= {"_load_jobs": {LOAD: ID}}
        else:
            given |= {"_jobs": {LOAD: (ID, False)}, "_load_job": {ID: LOAD}, "_store_jobs": defaultdict(set)}
            given |= {"_finished_reqs_waiting_for_store": set()}
            if stored:
                given["_jobs"][STORE] = (ID, True)
                given["_store_jobs"][ID].add(STORE)
        worker = bare(worker_class, **given)
        jobs = {LOAD, STORE} if stored else {LOAD}
        status = SimpleNamespace(transfer_jobs=jobs, req_context=None, update_offload_keys=lambda: None)
        job_status = SimpleNamespace(non_sliding_window_block_ids=[1], deferred_fence_block_ids=[1])
        scheduler = bare(
            scheduler_class,
            _requests={},
            _request_block_ids={},
            _next_stored_block_idx={},
            _req_status={ID: status},
            _reqs_being_stored={ID: {b"key"}} if stored else {},
            _jobs=dict.fromkeys(jobs, job_status),
            _block_id_to_pending_jobs={},
            manager=MagicMock(),
            _maybe_observe_lookup_async_delay=lambda status: None,
        )
        blocks = [[1]] if "block_ids" in scheduler_class.request_finished.__code__.co_varnames[:3] else []
        return Load(
            lambda: ended.extend(sorted(jobs)),
            lambda: scheduler.request_finished(request(), *blocks)[0],
            worker.get_finished,
        )

    return play(load)


def simple_cpu_offload() -> dict[str, Any] | None:
    worker_class = found("SimpleCPUOffloadWorker", "vllm.v1.simple_kv_offload.worker")
    if worker_class is None:
        return None
    scheduler_class = found("SimpleCPUOffloadScheduler", "vllm.v1.simple_kv_offload.manager")

    def load() -> Load:
        event = SimpleNamespace(done=False)
        event.query = lambda: event.done
        metadata = SimpleNamespace(load_event_to_reqs={0: [ID]}, load_cpu_blocks=[], store_gpu_blocks=[])
        worker = bare(
            worker_class,
            _connector_metadata=metadata,
            _pending_load_event_indices={0},
            _pending_store_event_indices=set(),
            _load_events=[(0, event)],
            _store_events=[],
            _load_hwm=-1,
            _store_hwm=-1,
            _completed_store_events={},
            _backend=MagicMock(),
        )
        state = SimpleNamespace(load_event=0, finished=False, transfer_meta=None)
        given: dict[str, Any] = {"_reqs_to_load": {ID: state}, "_pending_cpu_hits": {}, "_reqs_to_store": {}}
        scheduler = bare(scheduler_class, **given, _lazy_mode=True)
        return Load(
            lambda: setattr(event, "done", True),
            lambda: scheduler.request_finished(request(), [1])[0],
            worker.get_finished,
        )

    return play(load)


def mooncake(*, fails: bool = False) -> dict[str, Any]:
    """A pull from a prefill engine that answers that it is done, or that it failed."""
    if "mooncake.engine" not in sys.modules:
        package, engine = types.ModuleType("mooncake"), types.ModuleType("mooncake.engine")
        engine.TransferEngine = MagicMock  # type: ignore[attr-defined]
        sys.modules.update({"mooncake": package, "mooncake.engine": engine})
    places = ("mooncake.mooncake_connector", "mooncake_connector")
    worker_class, scheduler_class = (found(f"MooncakeConnector{side}", *places) for side in ("Worker", "Scheduler"))
    pull_class, response_class = found("PullReqMeta", *places), found("MooncakeXferResponse", *places)

    def load() -> Load:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        given: dict[str, Any] = {"receiver_loop": loop, "is_kv_producer": False, "is_kv_consumer": True, "tp_rank": 0}
        given |= {"kv_role": "kv_consumer", "finished_recving_reqs": set(), "xfer_stats": MagicMock()}
        given |= {"_invalid_block_ids": queue.Queue(), "_failed_recv_reqs": queue.Queue(), "_is_hma_required": False}
        worker = bare(worker_class, **given)
        scheduler = bare(scheduler_class, kv_role="kv_consumer", _reqs_need_recv={}, _reqs_need_send={})
        pulls: dict[str, Any] = {}
        if pull_class is not None:
            pull = {"d_req_id": ID, "transfer_id": "x", "local_block_ids": [[1]], "remote_engine_id": "peer"}
            pulls[ID] = pull_class(**pull, remote_bootstrap_addr="http://peer", pull_tasks_count=1)

        def end() -> None:
            if pull_class is None:  # to 0.15.1 the receiving coroutine adds the id itself, where the answer is good
                if not fails:
                    worker.finished_recving_reqs.add(ID)
                return
            status = next(iter(type_of_status(places)))
            fields = {"err_reqs": [ID], "err_msg": "failed"} if fails else {"ok_reqs": [ID]}
            worker.process_pulling_result(response_class(status=status, **fields), pulls)

        ended = request(do_remote_prefill=False, transfer_id="x")
        return Load(end, lambda: bool(scheduler.request_finished(ended, [[1]])[0]), lambda ids: worker.get_finished())

    return play(load)


def type_of_status(places: Sequence[str]) -> Any:
    """The release's enumeration of what a prefill engine answers."""
    return found("MooncakeXferResponseStatus", *places)


def moriio_write() -> dict[str, Any]:
    """A decode engine in write mode: its scheduler and worker share what belongs to which transfer, as in one process."""
    module = "moriio.moriio_connector"
    worker_class, scheduler_class = (found(f"MoRIIOConnector{side}", module) for side in ("Worker", "Scheduler"))
    mode = found("MoRIIOMode", "moriio.moriio_common").WRITE
    by_transfer = "transfer_id_to_request_id" in source_of(worker_class)

    def load() -> Load:
        written: set[str] = set()

        def pop() -> set[str]:
            done = set(written)
            written.clear()
            return done

        mapping = {"transfer": ID}
        given: dict[str, Any] = {"is_producer": False, "mode": mode, "_unmatched_write_completions": set()}
        wrapper = SimpleNamespace(pop_finished_write_req_ids=pop, async_wait_reqid=lambda: None)
        worker = bare(worker_class, **given, moriio_wrapper=wrapper)
        scheduler = bare(scheduler_class, is_producer=False, mode=mode, _reqs_need_recv={}, _reqs_need_send={})
        scheduler.transfer_id_to_request_id, scheduler.request_id_to_transfer_id = mapping, {ID: "transfer"}
        ended = request(do_remote_prefill=False, transfer_id="transfer")

        def report(ids: set[str]) -> Any:
            if by_transfer:
                worker.start_load_kv(SimpleNamespace(transfer_id_to_request_id=scheduler.transfer_id_to_request_id))
            return worker.get_finished()

        return Load(
            lambda: written.add("transfer" if by_transfer else ID),
            lambda: bool(scheduler.request_finished(ended, [1])[0]),
            report,
        )

    return play(load)
