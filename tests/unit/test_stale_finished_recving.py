"""What the release tests leave out: connectors by their class, ids used more than twice, errors of the patch's own."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.stale_finished_recving import wrappers as stale
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"


class Status(str):
    WAITING_FOR_REMOTE_KVS = WAITING


class Request:
    def __init__(self, request_id: str, status: str = RUNNING, preemptions: int = 0) -> None:
        self.request_id = request_id
        self.status = Status(status)
        self.num_preemptions = preemptions
        self.client_index = 0
        self.streaming_queue: list[Any] | None = None
        self.resumable = False

    def is_finished(self) -> bool:
        return self.status == FINISHED


class Connector:
    announces = True

    def update_connector_output(self, output: Any) -> None: ...

    def request_finished(self, request: Any) -> tuple[bool, None]:
        return self.announces, None


class LMCacheMPConnector(Connector): ...


class NixlConnector(Connector):
    announces = False


class MultiConnector(Connector):
    def __init__(self, *children: Connector) -> None:
        self._connectors = list(children)

    def request_finished(self, request: Any) -> tuple[bool, None]:
        return any(child.request_finished(request)[0] for child in self._connectors), None


class Scheduler:
    """As much of a release's scheduler as the patch wraps or asks: it frees at the first completion."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self.requests: dict[str, Any] = {}
        self.finished_recving_kv_req_ids: set[str] = set()
        self.finished_req_ids: set[str] = set()  # that the workers are told of with the next step
        self.freed: list[Any] = []
        self.kv_cache_manager = SimpleNamespace(get_block_ids=lambda request_id: ([7, 8],))

    def schedule(self) -> Any:
        """A step, with which the workers are told."""
        finished, self.finished_req_ids = self.finished_req_ids, set()
        return SimpleNamespace(finished_req_ids=finished)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None: ...

    def add_request(self, request: Any) -> None:
        known = self.requests.get(request.request_id)
        if known is not None:
            assert known.streaming_queue is not None, "duplicate request id"
            known.streaming_queue.append(request)
            return
        self.requests[request.request_id] = request

    def get_num_unfinished_requests(self) -> int:
        return sum(not request.is_finished() for request in self.requests.values())

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        ended = []
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids or self.requests):
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            receives = request.status == WAITING and request_id not in self.finished_recving_kv_req_ids
            request.status = Status(finished_status)
            if not (self._connector_finished(request)[0] | receives):
                self._free_blocks(request)
            ended.append(request)
        return ended

    def _connector_finished(self, request: Any) -> tuple[bool, None]:
        result: tuple[bool, None] = self.connector.request_finished(request)
        return result

    def _free_blocks(self, request: Any) -> None:
        del self.requests[request.request_id]
        self.freed.append(request)

    def _update_from_kv_xfer_finished(self, kv_connector_output: Any) -> None:
        if self.connector is not None:
            self.connector.update_connector_output(kv_connector_output)
        for request_id in kv_connector_output.finished_recving or ():
            request = self.requests[request_id]
            if request.status == WAITING:
                self.finished_recving_kv_req_ids.add(request_id)
            else:
                assert request.is_finished()
                self._free_blocks(request)
        for request_id in kv_connector_output.finished_sending or ():
            assert self.requests[request_id].is_finished()
            self._free_blocks(self.requests[request_id])


def patched(connector: Any, context: PatchContext | None = None) -> Any:
    """A scheduler whose class the patch has wrapped."""
    context = context or PatchContext("stale-finished-recving", {}, {}, lambda: None)
    members: dict[str, Any] = {}
    for target, wrapper in stale.wrappers(context).items():
        if not target.startswith(stale.SCHEDULER):
            continue
        name = target.rpartition(".")[2]
        members[name] = guard.in_place_of(vars(Scheduler)[name], wrapper, context, target)
    return type("PatchedScheduler", (Scheduler,), members)(connector)


def report(scheduler: Any, received: Iterable[str] = (), sent: Iterable[str] = (), failed: Iterable[int] = ()) -> None:
    given = set(received) or None, set(sent) or None
    output = SimpleNamespace(finished_recving=given[0], finished_sending=given[1], invalid_block_ids=set(failed))
    scheduler._update_from_kv_xfer_finished(output)
    assert (output.finished_recving, output.finished_sending) == given, "others read it too"


def aborted_while_loading(scheduler: Any, preemptions: int = 0) -> Any:
    request = Request("a", WAITING, preemptions)
    scheduler.add_request(request)
    scheduler.finish_requests(["a"], FINISHED)
    return request


@pytest.mark.parametrize("connector", [LMCacheMPConnector(), MultiConnector(NixlConnector(), LMCacheMPConnector())])
def test_what_lmcache_announces_of_a_request_that_never_ran_is_not_waited_for(connector: Any) -> None:
    scheduler = patched(connector)
    request = aborted_while_loading(scheduler)
    report(scheduler, sent=["a"])
    assert scheduler.freed == [], "the load still writes"
    report(scheduler, received=["a"])
    assert scheduler.freed == [request]
    request = aborted_while_loading(scheduler)
    report(scheduler, received=["a"])
    assert scheduler.freed[1:] == [request], "a server that is lost reports no send"
    request = Request("a")
    scheduler.add_request(request)
    scheduler.finish_requests(["a"], FINISHED)
    scheduler.update_from_output(scheduler.schedule(), None)
    report(scheduler, sent=["a"])
    assert scheduler.freed[2:] == [request], "its own send, not the one that was never reported"


def test_the_word_of_an_empty_send_may_be_on_its_way_with_a_step_when_the_next_request_of_its_id_ends() -> None:
    scheduler = patched(LMCacheMPConnector())
    first = aborted_while_loading(scheduler)
    report(scheduler, received=["a"])
    assert scheduler.freed == [first]
    earlier = scheduler.schedule()
    request = Request("a")
    scheduler.add_request(request)
    scheduler.finish_requests(["a"], FINISHED)
    own = scheduler.schedule()
    scheduler.update_from_output(earlier, None)
    report(scheduler, sent=["a"])
    assert scheduler.freed == [first], "the workers had not heard of the second when they said so"
    assert "update_from_output" in vars(scheduler)
    scheduler.update_from_output(own, None)
    assert "update_from_output" not in vars(scheduler), "what comes of later steps is not looked at"
    report(scheduler, sent=["a"])
    assert scheduler.freed == [first, request]


def test_somebody_elses_update_from_output_of_one_scheduler_is_called_and_put_back() -> None:
    scheduler = patched(LMCacheMPConnector())
    seen: list[Any] = []
    theirs = scheduler.update_from_output = lambda scheduled, output: seen.append(scheduled)
    aborted_while_loading(scheduler)
    assert scheduler.update_from_output is not theirs
    step = scheduler.schedule()
    scheduler.update_from_output(step, None)
    assert (seen, scheduler.update_from_output) == ([step], theirs)
    report(scheduler, received=["a"], sent=["a"])
    assert len(scheduler.freed) == 1


def test_lmcache_cannot_have_sent_what_it_does_not_know_of() -> None:
    """The word is of an earlier request with that id, whose empty send was not waited for."""
    scheduler = patched(LMCacheMPConnector())
    request = Request("a")
    scheduler.add_request(request)
    scheduler.finish_requests(["a"], FINISHED)
    scheduler.finished_req_ids = {"a"}
    report(scheduler, sent=["a"])
    assert scheduler.freed == []
    scheduler.finished_req_ids = set()
    report(scheduler, sent=["a"])
    assert scheduler.freed == [request]


@pytest.mark.parametrize(
    ("connector", "preemptions"), [(LMCacheMPConnector(), 1), (MultiConnector(Connector(), LMCacheMPConnector()), 0)]
)
def test_any_other_send_is_waited_for(connector: Any, preemptions: int) -> None:
    scheduler = patched(connector)
    request = aborted_while_loading(scheduler, preemptions)
    report(scheduler, received=["a"])
    assert scheduler.freed == []
    report(scheduler, sent=["a"])
    assert scheduler.freed == [request]


def test_a_load_that_lmcache_refuses_has_ended() -> None:
    scheduler = patched(LMCacheMPConnector())
    request = aborted_while_loading(scheduler)
    report(scheduler, sent=["a"], failed=[3])
    assert scheduler.freed == [], "somebody else's block"
    report(scheduler, failed=[8])
    assert scheduler.freed == [request]


def test_failed_blocks_of_another_connector_say_nothing_of_the_load() -> None:
    scheduler = patched(Connector())
    aborted_while_loading(scheduler)
    report(scheduler, sent=["a"], failed=[8])
    assert scheduler.freed == []


def test_an_id_that_is_used_a_third_time_waits_for_both() -> None:
    scheduler = patched(NixlConnector())
    first = aborted_while_loading(scheduler)
    second, third = Request("a"), Request("a")
    scheduler.add_request(second)
    scheduler.add_request(third)
    assert scheduler.get_num_unfinished_requests() == 2
    report(scheduler, received=["a"])
    assert scheduler.requests == {"a": second}
    assert scheduler.freed == [first]
    assert scheduler.get_num_unfinished_requests() == 2
    scheduler.finish_requests("a", FINISHED)
    assert scheduler.requests == {"a": third}
    assert scheduler.get_num_unfinished_requests() == 1
    assert "get_num_unfinished_requests" not in vars(scheduler), "nothing is left behind"


def test_a_parked_request_that_is_aborted_is_named_as_the_release_names_it() -> None:
    scheduler = patched(NixlConnector())
    aborted_while_loading(scheduler)
    parked = Request("a")
    scheduler.add_request(parked)
    assert scheduler.finish_requests(None, FINISHED) == [parked]
    assert parked.is_finished()
    report(scheduler, received=["a"])
    assert scheduler.requests == {}
    facts = {"aborted_as": "pair"}
    scheduler = patched(NixlConnector(), PatchContext("stale-finished-recving", {}, facts, lambda: None))
    aborted_while_loading(scheduler)
    scheduler.add_request(Request("a"))
    assert scheduler.finish_requests(["a"], FINISHED) == [("a", 0)]


def test_all_that_is_finished_at_once_is_so_with_what_waits_behind_it() -> None:
    scheduler = patched(NixlConnector())
    first = aborted_while_loading(scheduler)
    second, third = Request("a"), Request("a")
    scheduler.add_request(second)
    scheduler.add_request(third)
    report(scheduler, received=["a"])
    assert scheduler.requests == {"a": second}
    assert scheduler.finish_requests(None, FINISHED) == [second, third]
    assert scheduler.requests == {}
    assert scheduler.freed == [first, second]
    assert "get_num_unfinished_requests" not in vars(scheduler), "nothing is left behind"


def test_the_parts_of_a_parked_session_follow_its_first() -> None:
    scheduler = patched(NixlConnector())
    aborted_while_loading(scheduler)
    opening, more, end, other = Request("a"), Request("a"), Request("a"), Request("a")
    opening.resumable = more.resumable = True
    opening.streaming_queue = []
    for request in (opening, more, end, other):
        scheduler.add_request(request)
    report(scheduler, received=["a"])
    assert scheduler.requests == {"a": opening}
    assert opening.streaming_queue == [more, end], "else the session waits for what waits for the session's end"
    scheduler.finish_requests("a", FINISHED)
    assert scheduler.requests == {"a": other}


@pytest.mark.parametrize("name", ["PAUSED_NEW", "PAUSED_ALL"])
def test_a_paused_engine_comes_to_rest_though_requests_are_parked(name: str) -> None:
    scheduler = patched(NixlConnector())
    aborted_while_loading(scheduler)
    scheduler.add_request(Request("a"))
    scheduler._pause_state = SimpleNamespace(name=name)
    assert scheduler.get_num_unfinished_requests() == 0
    scheduler._pause_state = SimpleNamespace(name="UNPAUSED")
    assert scheduler.get_num_unfinished_requests() == 1


class BrokenStatus:
    """A status that the patch cannot read."""

    def __eq__(self, other: object) -> bool:
        return other == FINISHED

    __hash__ = None  # type: ignore[assignment]


def test_where_completions_cannot_be_sorted_what_is_held_stays_held() -> None:
    logged: list[str] = []
    context = PatchContext("stale-finished-recving", {}, {}, lambda: None, failed=logged.append)
    scheduler = patched(Connector(), context)
    request = aborted_while_loading(scheduler)
    other = Request("b")
    scheduler.add_request(other)
    other.status = BrokenStatus()  # type: ignore[assignment]
    report(scheduler, received=["b"], sent=["a"])
    assert scheduler.freed == [other], "left to the release"
    assert context.aside
    assert "AttributeError" in logged[0]
    report(scheduler, received=["a"])
    assert scheduler.freed == [other, request], "the patch goes on for what it holds"
    later = Request("c")
    scheduler.add_request(later)
    scheduler.finish_requests(["c"], FINISHED)
    report(scheduler, sent=["c"])
    assert scheduler.freed[-1] is later, "and leaves the rest to the release"


def test_an_error_of_the_report_changes_nothing_of_what_is_done() -> None:
    def cannot_count() -> None:
        raise OSError("no report")

    context = PatchContext("stale-finished-recving", {}, {}, cannot_count)
    scheduler = patched(Connector(), context)
    request = aborted_while_loading(scheduler)
    report(scheduler, sent=["a"])
    assert context.aside
    assert scheduler.freed == []
    report(scheduler, received=["a"])
    assert scheduler.freed == [request]


def test_what_lies_before_a_window_is_not_freed_while_it_is_loaded() -> None:
    """To 0.19 releases free it before they ask the connector, whatever still writes there."""
    scheduler = patched(Connector())
    removed: list[str] = []

    class Manager:
        def get_block_ids(self, request_id: str) -> tuple[list[int]]:
            return ([7, 8],)

        def remove_skipped_blocks(self, request_id: str) -> None:
            removed.append(request_id)

    class FreesWhatIsSkipped(Connector):
        def request_finished(self, request: Any) -> tuple[bool, None]:
            scheduler.kv_cache_manager.remove_skipped_blocks(request.request_id)
            return super().request_finished(request)

    scheduler.kv_cache_manager, scheduler.connector = Manager(), FreesWhatIsSkipped()
    aborted_while_loading(scheduler)
    assert removed == []
    scheduler.add_request(Request("b"))
    scheduler.finish_requests(["b"], FINISHED)
    assert removed == ["b"], "of others it is freed as before"


@pytest.mark.parametrize(("received", "sent"), [(["unknown"], []), ([], ["unknown"])])
def test_a_scheduler_without_a_connector_is_spared_what_it_does_not_know_too(
    received: list[str], sent: list[str]
) -> None:
    livepatch = PatchContext("stale-finished-recving", {}, {}, lambda: None)
    scheduler = patched(None, livepatch)
    report(scheduler, received, sent)
    assert sum(livepatch.counters.values()) == 1
    assert not livepatch.aside
