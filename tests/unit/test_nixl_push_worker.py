"""`nixl-push-failures` at the worker: what is not written any more, which leases are held, what decode forgets.

The worker stands in for the release's, which needs NIXL. What it says to decode is in test_nixl_push_failures.py.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.nixl_push_failures import wrappers as patch
from vllm_livepatch.patches.nixl_push_failures.decode import HOST, PORT, TOKEN
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext


class Worker:
    """A push worker whose ids are a base id, and behind a dash what its own engine added."""

    def __init__(self) -> None:
        self.context = PatchContext(
            "nixl-push-failures", {"WAIT_SECONDS": 0.0, "SETTLE_SECONDS": 0.0}, {}, lambda: None
        )
        self.targets = patch.wrappers(self.context)
        self.kv_transfer_config = SimpleNamespace(get_from_extra_config=lambda name, default: default)
        methods = ("make_prepped_xfer", "transfer", "check_xfer_state", "release_xfer_handle", "get_new_notifs")
        self.nixl_wrapper = SimpleNamespace(**{name: lambda *args: None for name in methods})
        self._pending_d_registrations: dict[str, dict[str, Any]] = {}
        self._sending_transfers: dict[str, list[Any]] = {}
        self._reqs_to_send: dict[str, float] = {}
        self._recving_metadata: dict[str, Any] = {}
        self._failed_recv_reqs: queue.Queue[str] = queue.Queue()
        self._is_hma_required = False
        self.handled: list[str] = []
        self.targets[f"{patch.WORKER}.__init__"](lambda: None, self, (), {})
        self.answers = vars(self)[patch._ANSWERS]
        self.desk = vars(self)[patch._DESK]
        self.messages: list[dict[str, Any]] = []
        self.answers._say = lambda address, message: self.messages.append(message)
        self.written: list[str] = []

    def _handle_failed_transfer(self, request_id: str, handle: Any) -> None:
        self.handled.append(request_id)

    def _pop_matching_registration(self, request_id: str) -> dict[str, Any] | None:
        return self._pending_d_registrations.pop(request_id, None)

    def registration(self, token: str = "t") -> dict[str, Any]:
        return {TOKEN: token, HOST: "127.0.0.1", PORT: 9, "request_id": "d"}

    def push(self, request_id: str, registration: dict[str, Any], during: Callable[[], None] = lambda: None) -> None:
        def start(request_id: str, *_: Any) -> None:
            during()
            self.written.append(request_id)

        self.targets[f"{patch.WORKER}._do_start_push_kv"](start, self, (request_id, None, registration), {})

    def step(self, sent: tuple[str, ...] = (), received: tuple[str, ...] = ()) -> None:
        self.targets[f"{patch.WORKER}.get_finished"](lambda: (set(sent), set(received)), self, (), {})

    def lease(self, request_id: str) -> float:
        """How many seconds it still runs."""
        return self._reqs_to_send[request_id] - time.perf_counter()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    module = SimpleNamespace(get_base_request_id=lambda request_id: request_id.partition("-")[0])
    monkeypatch.setitem(sys.modules, patch.WORKER.partition(":")[0], module)
    return Worker()


def refused(worker: Worker) -> dict[str, Any]:
    registration = worker.registration()
    worker.answers.refuse(worker.answers.take(registration))
    assert worker.messages[-1] == {"refused": "t", "posted": False}
    return registration


# Prefill


def test_what_decode_knows_will_not_come_is_not_written(worker: Worker) -> None:
    """Its blocks may be another request's by then."""
    worker.push("a-p", refused(worker))
    assert (worker.written, worker.context.counters["left"]) == ([], 1)
    worker.push("a-p", worker.registration("another"))
    assert worker.written == ["a-p"]


def test_nor_when_the_patch_has_stood_aside(worker: Worker) -> None:
    registration = refused(worker)

    class Release:
        def _do_start_push_kv(self, request_id: str, local: Any, registration: Any) -> None:
            worker.written.append(request_id)

    target = f"{patch.WORKER}._do_start_push_kv"
    push = guard.in_place_of(Release._do_start_push_kv, worker.targets[target], worker.context, target)
    release = Release()
    setattr(release, patch._ANSWERS, worker.answers)
    worker.context.withdraw()
    push(release, "a-p", None, registration)
    assert worker.written == []
    push(release, "b-p", None, worker.registration("another"))
    assert worker.written == ["b-p"]


def test_what_was_refused_is_not_kept_for_a_later_match(worker: Worker) -> None:
    worker._pending_d_registrations = {"a": refused(worker), "b": worker.registration("another")}
    worker.answers.tidy = True
    worker.nixl_wrapper.get_new_notifs()
    assert list(worker._pending_d_registrations) == ["b"]


def test_who_registers_for_a_request_that_is_over_is_refused(worker: Worker) -> None:
    """Once the scheduler has been told, its blocks may be another's: neither what waits nor what begins is written."""
    worker.answers.ended([("a", "a-p")])
    worker._pending_d_registrations = {"a-d": worker.registration(), "b-d": worker.registration("another")}
    worker.targets[f"{patch.WORKER}._handle_push_reg_notif"](lambda: None, worker, (), {})
    assert list(worker._pending_d_registrations) == ["b-d"]
    worker.push("a-p", worker.registration("late"))
    assert worker.written == []
    assert [message for message in worker.messages if "refused" in message] == [
        {"refused": "t", "posted": False},
        {"refused": "late", "posted": False},
    ]
    worker.answers.begun("a")  # the id is used again
    worker.push("a-p", worker.registration("again"))
    assert worker.written == ["a-p"]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_request_that_begins_under_the_id_of_one_that_is_over_is_written(worker: Worker, by_name: bool) -> None:
    """And what the scheduler says will not be processed is over."""
    worker.answers.ended([("a", "a-p"), ("b", "b-p")])
    metadata = SimpleNamespace(reqs_in_batch={"a-q"}, reqs_not_processed={"c-p"})
    args, kwargs = ((), {"metadata": metadata}) if by_name else ((metadata,), {})
    worker.targets[f"{patch.WORKER}.start_load_kv"](lambda metadata: None, worker, args, kwargs)
    for request_id in ("a-q", "b-q", "c-p"):
        worker.push(request_id, worker.registration(request_id))
    assert worker.written == ["a-q"]
    assert not worker.context.aside


def test_what_ended_in_a_step_is_over(worker: Worker) -> None:
    worker.step(sent=("a-p",))
    worker.push("a-p", worker.registration())
    assert worker.written == []


@pytest.mark.parametrize("left", [0.0, 60.0])
def test_a_lease_does_not_end_while_its_blocks_are_written(worker: Worker, left: float) -> None:
    worker._reqs_to_send = {"a-p": time.perf_counter() + left, "b-p": time.perf_counter() + left}
    worker._sending_transfers = {"a-p": ["handle"], "unknown": ["handle"]}
    worker.step()
    assert worker.lease("a-p") > max(left, patch.HELD_SECONDS) - 1
    assert worker.lease("b-p") <= left


def test_nor_while_the_write_is_begun(worker: Worker) -> None:
    """The writer, another thread, has read the request's blocks, and NIXL has no handle for it yet."""
    worker._reqs_to_send = {"a-p": time.perf_counter()}
    worker.push("a-p", worker.registration(), worker.step)
    assert worker.lease("a-p") > patch.HELD_SECONDS - 1
    worker._reqs_to_send = {"a-p": time.perf_counter()}
    worker.step()
    assert worker.lease("a-p") <= 0


# Decode


def wait_for(worker: Worker, request_id: str) -> str:
    """A registration that has been sent, without the connections."""
    worker.desk._addresses["127.0.0.1"] = ("127.0.0.1", 9)
    added = worker.desk.register(request_id, "p", ("127.0.0.1", 9))
    return str(added[TOKEN])


def test_what_has_come_is_waited_for_no_more(worker: Worker) -> None:
    """An id that is used again would fail with what was said of the first."""
    token = wait_for(worker, "a")
    other = wait_for(worker, "b")
    worker.step(received=("a",))
    assert list(worker.desk.waiting) == [other]
    assert token not in worker.desk.waiting


def test_what_fails_is_reported_if_it_is_still_waited_for(worker: Worker) -> None:
    for request_id in ("a", "b"):
        worker.desk.waiting[wait_for(worker, request_id)].failed = 0.0
    worker._recving_metadata = {"a": SimpleNamespace()}
    worker.step()
    assert worker.handled == ["a"]
    assert [waiting.request_id for waiting in worker.desk.waiting.values()] == ["a"]


@pytest.mark.parametrize("agents", [{}, {"prefill": {}}])
def test_a_registration_with_an_engine_that_is_not_known_yet_is_sent_as_it_is(worker: Worker, agents: Any) -> None:
    vars(worker)["_remote_agents"] = SimpleNamespace(get=agents.get)
    registration = {"remote_engine_id": "prefill"}
    sent: list[Any] = []
    worker.targets[f"{patch.WORKER}._do_send_reg_notif"](
        lambda *registered: sent.append(registered), worker, ("d", registration), {}
    )
    assert sent == [("d", registration)]
    assert (worker.desk.waiting, worker.context.counters) == ({}, {})


@pytest.mark.parametrize(
    ("ranks", "stages", "decode", "covered"),
    [(1, 1, 1, True), (1, None, 1, True), (2, 1, 1, False), (1, 2, 1, False), (1, 1, 2, False)],
)
def test_prefill_is_asked_to_tell_what_fails_where_it_has_as_many_ranks(
    worker: Worker, ranks: int, stages: int | None, decode: int, covered: bool
) -> None:
    """Elsewhere each of several ranks would have a say: the release's registration goes out as it is, and that is said."""
    worker.desk._addresses["127.0.0.1"] = ("127.0.0.1", 9)
    vars(worker)["_remote_agents"] = {"prefill": {rank: f"agent {rank}" for rank in range(ranks)}}
    registration: dict[str, Any] = {
        "remote_engine_id": "prefill",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "remote_tp_size": 1,
        "decode_tp_size": decode,
    }
    if stages is not None:
        registration["remote_pp_size"] = stages
    sent: list[Any] = []
    worker.targets[f"{patch.WORKER}._do_send_reg_notif"](
        lambda *registered: sent.append(registered), worker, ("d", registration), {}
    )
    ((request_id, given),) = sent
    assert request_id == "d"
    assert {name: value for name, value in given.items() if name not in (TOKEN, HOST, PORT)} == registration
    assert (TOKEN in given) is covered
    assert [waiting.request_id for waiting in worker.desk.waiting.values()] == ["d"] * covered
    assert worker.context.counters == ({} if covered else {"not_covered": 1})
