"""`nixl-push-failures` at the worker: what is not written any more, which leases are held, what decode forgets.

The worker stands in for the release's, which needs NIXL. What it keeps and says is in test_nixl_push_failures.py.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.nixl_push_failures import prefill, words
from vllm_livepatch.patches.nixl_push_failures import wrappers as patch
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext

TOKEN, OTHER = "0" * 32, "1" * 32


class Agent:
    """NIXL's."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, bytes]] = []
        self.received: dict[Any, list[bytes]] = {}

    def transfer(self, handle: Any) -> None: ...

    def get_new_notifs(self) -> dict[Any, list[bytes]]:
        received, self.received = self.received, {}
        return received

    def send_notif(self, name: Any, notif_msg: bytes) -> None:
        self.sent.append((name, notif_msg))

    def get_reg_descs(self, descs: list[Any], kind: str) -> list[Any]:
        return descs

    def get_partial_agent_metadata(self, descs: list[Any], connection: bool, backends: list[Any]) -> bytes:
        assert (descs, connection, backends) == ([], True, [])
        return b"address"


class Worker:
    """A push worker whose ids are a base id, and behind a dash what its own engine added."""

    def __init__(self, by_request: bool = False) -> None:
        self.context = PatchContext(
            "nixl-push-failures", {"WAIT_SECONDS": 0.0}, {"by_request": by_request}, lambda: None
        )
        self.targets = patch.wrappers(self.context)
        self.kv_transfer_config = SimpleNamespace(get_from_extra_config=lambda name, default: default)
        self.nixl_wrapper: Any = Agent()
        self._push_writer_wake = threading.Event()
        self._pending_d_registrations: dict[str, dict[str, Any]] = {}
        self._sending_transfers: dict[str, list[Any]] = {}
        self._reqs_to_send: dict[str, float] = {}
        self._recving_metadata: dict[str, Any] = {}
        self._failed_recv_reqs: queue.Queue[str] = queue.Queue()
        self._invalid_block_ids: queue.Queue[set[int]] = queue.Queue()
        self._remote_agents: dict[str, Any] = {"decode": {0: b"d"}, "prefill": {0: b"p"}}
        self._handshake_futures: dict[str, Any] = {}
        self._handshake_lock = threading.RLock()
        self._is_hma_required = False
        self.handled: list[str] = []
        self.written: list[str] = []
        self.targets[f"{patch.WORKER}.__init__"](lambda: None, self)
        self.sides: patch.Sides = vars(self)[patch._SIDES]

    def _handle_failed_transfer(self, request_id: str, handle: Any) -> None:
        self.handled.append(request_id)

    def registration(self, token: str = TOKEN, request_id: str = "a-d") -> dict[str, Any]:
        return {"request_id": request_id, "decode_engine_id": "decode", words.ADDED: [token, b""]}

    def push(self, request_id: str, registration: dict[str, Any], during: Callable[[], None] = lambda: None) -> None:
        def start(request_id: str, *_: Any) -> None:
            during()
            self.nixl_wrapper.transfer("handle")
            self.written.append(request_id)

        self.targets[f"{patch.WORKER}._do_start_push_kv"](start, self, request_id, None, registration)

    def come(self, registration: dict[str, Any]) -> None:
        """A registration arrives, and matches nothing."""

        def handle(_: bytes) -> None:
            request_id = registration["request_id"]
            coming = self.targets[f"{patch.WORKER}._pop_matching_finished_blocks"]
            assert isinstance(coming, guard.Before)
            coming.look(self, request_id)
            self._pending_d_registrations[request_id] = registration

        self.targets[f"{patch.WORKER}._handle_push_reg_notif"](handle, self, b"")

    def step(self, sent: tuple[str, ...] = (), received: tuple[str, ...] = ()) -> None:
        self.targets[f"{patch.WORKER}.get_finished"](lambda: (set(sent), set(received)), self)

    def hear(self, kind: str, token: str) -> None:
        self.nixl_wrapper.received = {"somebody": [b"HB:a", words.notification(kind, token)]}
        assert self.nixl_wrapper.get_new_notifs() == {"somebody": [b"HB:a"]}

    def refused(self) -> list[str]:
        """The tokens of which decode was told."""
        return [token for _, sent in self.nixl_wrapper.sent for _, token in words.take({"": [sent]})]

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
    worker.come(registration)
    worker.hear(words.WITHDRAW, TOKEN)
    assert (worker.refused(), worker._pending_d_registrations) == ([TOKEN], {})
    return registration


# Prefill


@pytest.mark.parametrize("engine", [{}, {"decode_engine_id": ["d"]}, {"decode_engine_id": None}])
@pytest.mark.parametrize("added", [{}, {words.ADDED: [TOKEN, b"address"]}])
def test_a_registration_that_names_no_engine_is_the_release_s_alone(
    engine: dict[str, Any], added: dict[str, Any], worker: Worker
) -> None:
    """Who has NIXL's metadata of a worker, which its handshake's port gives to anybody, can send it any bytes."""
    registration = {"request_id": "a-d", **engine, **added}
    worker.come(registration)
    assert worker._pending_d_registrations == {"a-d": registration}

    def unreadable() -> None:
        raise KeyError("decode_engine_id")

    with pytest.raises(KeyError, match="decode_engine_id"):
        worker.push("a-p", registration, unreadable)
    assert worker.sides.answers.writing_for is None
    worker.step(sent=("a-p",))
    assert (worker.refused(), worker.nixl_wrapper.sent, worker.context.aside) == ([], [], False)


def test_what_decode_knows_will_not_come_is_not_written(worker: Worker) -> None:
    """Its blocks may be another request's by then."""
    worker.push("a-p", refused(worker))
    assert (worker.written, worker.context.counters["left"]) == ([], 1)
    worker.push("a-p", worker.registration(OTHER))
    assert worker.written == ["a-p"]


def test_nor_when_the_patch_has_stood_aside(worker: Worker) -> None:
    registration = refused(worker)

    class Release:
        def _do_start_push_kv(self, request_id: str, local: Any, registration: Any) -> None:
            worker.written.append(request_id)

    target = f"{patch.WORKER}._do_start_push_kv"
    push = guard.in_place_of(Release._do_start_push_kv, worker.targets[target], worker.context, target)
    release = Release()
    setattr(release, patch._SIDES, worker.sides)
    worker.context.withdraw()
    push(release, "a-p", None, registration)
    push(release, "a-p", None, worker.registration() | {prefill.LATE: True})
    assert worker.written == []
    push(release, "b-p", None, worker.registration(OTHER))
    assert worker.written == ["b-p"]


def test_who_registers_for_a_request_that_is_over_is_refused(worker: Worker) -> None:
    """Once the scheduler has been told, its blocks may be another's: neither what waits nor what begins is written."""
    worker.sides.answers.ended([("a", "a-p")])
    worker.come(worker.registration())
    worker.come(worker.registration(OTHER, "b-d"))
    assert list(worker._pending_d_registrations) == ["b-d"]
    worker.push("a-p", worker.registration("2" * 32))
    assert worker.written == []
    assert worker.refused() == [TOKEN, "2" * 32]
    worker.sides.answers.begun("a")  # the id is used again
    worker.push("a-p", worker.registration("3" * 32))
    assert worker.written == ["a-p"]


def test_a_registration_that_takes_another_s_place_leaves_that_refused(worker: Worker) -> None:
    """The release keeps one for each id: the first is served by nobody any more."""
    worker.come(worker.registration())
    worker.come(worker.registration(OTHER))
    assert worker.refused() == [TOKEN]
    (kept,) = worker._pending_d_registrations.values()
    assert kept[words.ADDED][0] == OTHER
    worker.hear(words.WITHDRAW, OTHER)
    assert worker.refused() == [TOKEN, OTHER]


def test_a_registration_that_matches_at_once_or_cannot_be_read_waits_for_nothing(worker: Worker) -> None:
    worker.targets[f"{patch.WORKER}._handle_push_reg_notif"](lambda notification: None, worker, b"")
    assert worker.sides.answers._waiting == {}


@pytest.mark.parametrize("by_name", [False, True])
def test_a_request_that_begins_under_the_id_of_one_that_is_over_is_written(worker: Worker, by_name: bool) -> None:
    """And what the scheduler says will not be processed is over."""
    worker.sides.answers.ended([("a", "a-p"), ("b", "b-p")])
    metadata = SimpleNamespace(reqs_in_batch={"a-q"}, reqs_not_processed={"c-p"})
    args, kwargs = ((), {"metadata": metadata}) if by_name else ((metadata,), {})
    worker.targets[f"{patch.WORKER}.start_load_kv"](lambda metadata: None, worker, *args, **kwargs)
    for number, request_id in enumerate(("a-q", "b-q", "c-p")):
        worker.push(request_id, worker.registration(f"{number:032x}"))
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


def test_a_write_that_cannot_be_prepared_is_told_and_one_that_was_posted_is_not(worker: Worker) -> None:
    def fail() -> None:
        raise RuntimeError("NIXL knows no such agent")

    with pytest.raises(RuntimeError):
        worker.push("a-p", worker.registration(), fail)
    worker.nixl_wrapper.get_new_notifs()
    assert worker.refused() == [TOKEN]
    worker.push("b-p", worker.registration(OTHER, "b-d"))
    worker.hear(words.WITHDRAW, OTHER)
    assert worker.refused() == [TOKEN]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_handshake_is_waited_for(worker: Worker, by_name: bool) -> None:
    future = SimpleNamespace(add_done_callback=lambda call: None)
    registration = worker.registration()

    def start(*_: Any) -> None:
        args, kwargs = ((), {"engine_id": "decode"}) if by_name else (("decode",), {})
        assert (
            worker.targets[f"{patch.BASE}._ensure_handshake"](lambda *_, **__: future, worker, *args, **kwargs)
            is future
        )

    worker.targets[f"{patch.WORKER}._do_start_push_kv"](start, worker, "a-p", None, registration)
    worker.nixl_wrapper.get_new_notifs()
    assert worker.refused() == []
    worker.push("a-p", registration)
    assert worker.written == ["a-p"]


def test_a_worker_that_ends_tells_and_leaves_nothing_behind(worker: Worker) -> None:
    worker.come(worker.registration())
    worker.targets[f"{patch.WORKER}.shutdown"](lambda: None, worker)
    assert worker.refused() == [TOKEN]
    assert patch._SIDES not in vars(worker)
    assert set(vars(worker.nixl_wrapper)) == {"sent", "received"}
    assert "wait" not in vars(worker._push_writer_wake)
    worker.targets[f"{patch.WORKER}.shutdown"](lambda: None, worker)  # the release's __del__
    for target in ("get_finished", "_handle_push_reg_notif"):
        worker.targets[f"{patch.WORKER}.{target}"](lambda *_: (set(), set()), worker, b"")


def test_so_does_one_whose_release_raises(worker: Worker) -> None:
    def fail() -> None:
        raise KeyError("an engine of which no activity is known")

    with pytest.raises(KeyError):
        worker.targets[f"{patch.WORKER}.shutdown"](fail, worker)
    assert patch._SIDES not in vars(worker)


def test_a_writer_that_rests_looks_for_notifications_now_and_then(worker: Worker, monkeypatch: Any) -> None:
    """An idle engine wakes it for none: what decode asks would wait for the next request."""
    monkeypatch.setattr(patch, "IDLE_SECONDS", 0.001)
    assert worker._push_writer_wake.wait() is False
    worker._push_writer_wake.set()
    assert worker._push_writer_wake.wait(60) is True


# Decode


def register(worker: Worker, request_id: str, **more: Any) -> dict[str, Any]:
    """What is sent."""
    registration = {
        "remote_engine_id": "prefill",
        "remote_tp_size": 1,
        "decode_tp_size": 1,
        "remote_pp_size": 1,
        **more,
    }
    sent: list[Any] = []
    worker.targets[f"{patch.WORKER}._do_send_reg_notif"](
        lambda *registered: sent.append(registered), worker, request_id, registration
    )
    ((given, added),) = sent
    assert given == request_id
    assert {name: value for name, value in added.items() if name != words.ADDED} == registration
    return dict(added)


def token_of(registration: dict[str, Any]) -> str:
    added = words.added_to(registration)
    assert added is not None
    assert added.address == b"address"
    return added.token


def test_what_has_come_is_waited_for_no_more(worker: Worker) -> None:
    """An id that is used again would fail with what was said of the first."""
    register(worker, "a")
    register(worker, "b")
    worker.step(received=("a",))
    assert list(worker.sides.desk._of_request) == ["b"]


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_fails_is_reported_if_it_is_still_waited_for(worker: Worker, hybrid: bool) -> None:
    worker._is_hma_required = hybrid
    worker._recving_metadata = {"a": SimpleNamespace(local_block_ids=([1], [2, 3]))}
    for request_id in ("a", "b"):
        worker.hear(words.REFUSED, token_of(register(worker, request_id)))
    worker.step()
    worker.step()
    assert worker.handled == ["a"]
    assert list(worker._invalid_block_ids.queue) == ([{1, 2, 3}] if hybrid else [])
    assert worker.context.counters == {"refused": 2, "failed": 1}


def test_from_0_30_0_the_request_is_named(worker: Worker) -> None:
    newer = Worker(by_request=True)
    newer._recving_metadata = {"a": SimpleNamespace()}
    newer.hear(words.REFUSED, token_of(register(newer, "a")))
    results = SimpleNamespace(finished_sending=set(), finished_recving=set())
    newer.targets[f"{patch.WORKER}.get_transfer_results"](lambda: results, newer)
    assert list(newer._failed_recv_reqs.queue) == ["a"]


def test_prefill_is_asked_by_the_writer(worker: Worker) -> None:
    token = token_of(register(worker, "a"))
    worker.nixl_wrapper.get_new_notifs()
    assert worker.nixl_wrapper.sent == []
    for waiting in worker.sides.desk._of_request.values():
        waiting.ask_at = 0.0
    worker.sides.desk._look = 0.0
    worker.nixl_wrapper.get_new_notifs()
    assert worker.nixl_wrapper.sent == [("p", words.notification(words.WITHDRAW, token))]


def test_to_0_29_0_a_failed_write_is_no_failed_load(worker: Worker) -> None:
    """The release would look for the request among those that it loads, and assert."""
    worker._recving_metadata = {"load": SimpleNamespace()}
    for request_id in ("write", "load", "write"):
        worker._failed_recv_reqs.put(request_id)
    worker.step()
    assert list(worker._failed_recv_reqs.queue) == ["load"]
    assert worker.context.counters == {"write_failed": 1}


def test_a_registration_with_an_engine_that_is_not_known_yet_is_sent_as_it_is(worker: Worker) -> None:
    assert words.ADDED not in register(worker, "d", remote_engine_id="nobody")
    assert (worker.sides.desk._of_request, worker.context.counters) == ({}, {})


@pytest.mark.parametrize(
    ("ranks", "more", "covered"),
    [
        (1, {}, True),
        (2, {}, False),
        (1, {"remote_pp_size": 2}, False),
        (1, {"decode_tp_size": 2}, False),
        (1, {"remote_tp_size": 4}, False),
    ],
)
def test_prefill_is_asked_to_tell_what_fails_where_it_has_as_many_ranks(
    worker: Worker, ranks: int, more: dict[str, int], covered: bool
) -> None:
    """Elsewhere each of several ranks would have a say: the release's registration goes out as it is, and that is said."""
    worker._remote_agents["prefill"] = {rank: f"agent {rank}" for rank in range(ranks)}
    assert (words.ADDED in register(worker, "d", **more)) is covered
    assert list(worker.sides.desk._of_request) == ["d"] * covered
    assert worker.context.counters == ({} if covered else {"not_covered": 1})


def test_a_registration_of_a_release_that_knows_no_stages_is_covered(worker: Worker) -> None:
    registration = {"remote_engine_id": "prefill", "remote_tp_size": 1, "decode_tp_size": 1}
    sent: list[Any] = []
    worker.targets[f"{patch.WORKER}._do_send_reg_notif"](
        lambda *registered: sent.append(registered), worker, "d", registration
    )
    assert words.ADDED in sent[0][1]
