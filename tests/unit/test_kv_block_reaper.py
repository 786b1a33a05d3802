"""What the release tests leave out: options, which connectors it works for, its cost, other patches of the same method."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import wrapt
from vllm_livepatch.patches.kv_block_reaper import wrappers as reaper
from vllm_livepatch.patches.stale_finished_recving import wrappers as stale
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext

LOOKS = PatchContext("looks", {}, {}, lambda: None)
OPTIONS = {"IDLE_SECONDS": 10.0, "ONLY_IDLE": False}


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reaper, "time", made)
    return made


def context(asked: bool = True, facts: Mapping[str, Any] = {}, **options: Any) -> PatchContext:
    return PatchContext("kv-block-reaper", {**OPTIONS, **options}, facts, lambda: None, asked=asked)


class Request:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.status = SimpleNamespace()
        self.num_preemptions = 0

    def is_finished(self) -> bool:
        return True


class Connector:
    def __init__(self) -> None:
        self.reported: list[set[str]] = []

    def update_connector_output(self, output: Any) -> None:
        self.reported.append(set(output.finished_sending or ()))


def scheduler_class(*patches: Mapping[str, Callable[..., Any]]) -> type[Any]:
    """As much of a scheduler as the patch meets, wrapped by patches in the order of their application."""

    class Scheduler:
        def __init__(self, connector: Any) -> None:
            self.connector = connector
            self.requests: dict[str, Any] = {}
            self.running: list[Any] = []
            self.finished_recving_kv_req_ids: set[str] = set()
            self.freed: list[str] = []

        def finish_requests(self, request_ids: Any, status: Any) -> None:
            for request_id in request_ids:
                self._free_request(self.requests[request_id])

        def get_num_unfinished_requests(self) -> int:
            return len(self.requests)

        def add_request(self, request: Any) -> None:
            self.requests[request.request_id] = request

        def _free_request(self, request: Any, delay_free_blocks: bool = False) -> None:
            self._connector_finished(request)

        def _connector_finished(self, request: Any) -> tuple[bool, None]:
            return True, None

        def _free_blocks(self, request: Any) -> None:
            self.freed.append(request.request_id)
            del self.requests[request.request_id]

        def _update_after_schedule(self, scheduled: Any = None) -> None: ...

        def _update_from_kv_xfer_finished(self, output: Any) -> None:
            if self.connector is not None:
                self.connector.update_connector_output(output)
            for request_id in output.finished_sending or ():
                assert request_id in self.requests
                self._free_blocks(self.requests[request_id])

        def hold(self, *request_ids: str) -> None:
            for request_id in request_ids:
                request = Request(request_id)
                self.add_request(request)
                self._free_request(request)

    for made in patches:
        for target, wrapper in made.items():
            owner, _, name = target.partition(":")[2].rpartition(".")
            if owner == "Scheduler":
                put: Any = wrapt.FunctionWrapper
                if isinstance(wrapper, (guard.After, guard.Shortcut)):
                    put = functools.partial(guard.in_place_of, context=LOOKS, target=f"engine:Scheduler.{name}")
                setattr(Scheduler, name, put(vars(Scheduler)[name], wrapper))
    return Scheduler


def output(*sent: str) -> Any:
    return SimpleNamespace(finished_sending=set(sent), finished_recving=None, invalid_block_ids=set())


def named(name: str, base: type = Connector, **side: Any) -> Any:
    made = type(name, (base,), {})()
    made.connector_scheduler = SimpleNamespace(**side)
    return made


def test_only_idle_waits_until_nothing_runs(clock: Clock) -> None:
    scheduler = scheduler_class(reaper.wrappers(context(ONLY_IDLE=True)))(Connector())
    scheduler.hold("a")
    scheduler.running = ["b"]
    clock.now = 1000
    scheduler._update_after_schedule()
    assert scheduler.freed == []
    scheduler.running = []
    scheduler._update_after_schedule()
    assert scheduler.freed == ["a"]


@pytest.mark.parametrize(
    ("connector", "watches"),
    [
        (named("NixlConnector"), True),
        (named("NixlPullConnector", type("NixlBaseConnector", (Connector,), {})), True),
        (named("OfTheUsers", type("NixlConnector", (Connector,), {})), True),
        (named("MoRIIOConnector"), False),
        (named("LMCacheMPConnector"), False),
        (named("MooncakeStoreConnector"), False),
        (SimpleNamespace(_connectors=[named("LMCacheMPConnector"), named("NixlConnector")]), True),
        (SimpleNamespace(_connectors=[named("LMCacheMPConnector")]), False),
        (None, False),
    ],
)
def test_by_itself_it_works_for_connectors_that_need_it(connector: Any, watches: bool, clock: Clock) -> None:
    livepatch = context(asked=False, facts={"needed_by": ["Nixl"]})
    scheduler = scheduler_class(reaper.wrappers(livepatch))(connector)
    scheduler.hold("a")
    clock.now = 1000
    scheduler._update_after_schedule()
    assert scheduler.freed == (["a"] if watches else [])
    assert livepatch.counters.get("not_needed", 0) == (not watches and connector is not None)


@pytest.mark.parametrize(("seconds", "asked", "after"), [(0.0, False, None), (0.0, True, 3600), (900.0, False, 900)])
def test_no_time_is_past_a_lease_that_is_renewed_unless_somebody_says_so(
    seconds: float, asked: bool, after: float | None, clock: Clock
) -> None:
    """Decode renews for as long as its request waits, and then reads. The scheduler hears of neither."""
    livepatch = context(asked=asked, facts={"needed_by": ["Nixl"]}, IDLE_SECONDS=seconds)
    nixl = named("NixlPullConnector", type("NixlBaseConnector", (Connector,), {}), _kv_lease_duration=30)
    scheduler = scheduler_class(reaper.wrappers(livepatch))(nixl)
    scheduler.hold("a")
    for now in (after or 1e6, (after or 1e6) + 1):
        clock.now = now - 0.5
        scheduler._update_after_schedule()
        assert scheduler.freed == (["a"] if after is not None and now > after else [])
    assert livepatch.counters.get("not_needed", 0) == (after is None)


def test_the_age_is_above_the_connectors_own_timeout_of_children_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = SimpleNamespace(VLLM_NIXL_ABORT_REQUEST_TIMEOUT=480, VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=1000)
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    old_nixl, moriio = named("NixlConnector"), named("MoRIIOConnector", _defer_timeout=60.0)
    mooncake = named("MooncakeConnector")
    assert reaper.default_age(old_nixl) == 610
    assert reaper.default_age(mooncake) == 1260
    assert reaper.default_age(moriio) == 85
    assert reaper.default_age(named("NixlConnector", _kv_lease_duration=30)) == 3600, "renewed for as long as it takes"
    assert reaper.default_age(named("NixlConnector", _kv_lease_duration=30, decoder_kv_blocks_ttl=4000)) == 5010
    assert reaper.default_age(named("LMCacheMPConnector")) == 600
    assert reaper.default_age(named("MoRIIOConnector")) == 600
    assert reaper.default_age(SimpleNamespace(_connectors=[moriio, mooncake])) == 1260


def test_an_age_below_the_connectors_own_is_taken_and_logged(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    scheduler = scheduler_class(reaper.wrappers(context()))(named("MoRIIOConnector", _defer_timeout=60.0))
    scheduler.hold("a")
    assert "sooner than the 85 s" in capfd.readouterr().err
    clock.now = 10
    scheduler._update_after_schedule()
    assert scheduler.freed == ["a"]


def test_to_0_15_a_pending_receive_is_noticed_as_the_request_is_aborted(clock: Clock) -> None:
    made = reaper.wrappers(context(facts={"knows_receives": False}))
    scheduler = scheduler_class(made)(Connector())
    scheduler.finished_recving_kv_req_ids = {"arrived"}

    class Status:
        WAITING_FOR_REMOTE_KVS = "waiting"

        def __eq__(self, other: object) -> bool:
            return other == "waiting"

    for name in ("arrives", "arrived"):
        request = Request(name)
        request.status = Status()  # type: ignore[assignment]
        scheduler.add_request(request)

    scheduler.finish_requests(iter(["arrives", "arrived"]), "aborted")
    clock.now = 1000
    scheduler._update_after_schedule()
    assert scheduler.freed == ["arrived"]


def test_what_is_not_due_is_not_looked_at(clock: Clock) -> None:
    scheduler = scheduler_class(reaper.wrappers(context()))(Connector())
    scheduler.hold("due")
    clock.now = 5
    scheduler.hold(*(f"r{number}" for number in range(10_000)))
    looked_at: list[str] = []

    class Watched(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            looked_at.append(key)
            return super().get(key, default)

        def __iter__(self) -> Any:
            raise AssertionError("all requests are looked at")

    scheduler.requests = Watched(scheduler.requests)
    clock.now = 10
    scheduler._update_after_schedule()
    scheduler._update_after_schedule()
    assert looked_at == ["due"]
    assert scheduler.freed == ["due"]


@pytest.mark.parametrize("first", ["reaper", "stale"])
def test_with_the_patch_of_the_same_method_in_both_orders(first: str, clock: Clock) -> None:
    mine, theirs = context(), PatchContext("stale-finished-recving", {}, {}, lambda: None)
    made = [reaper.wrappers(mine), stale.wrappers(theirs)]
    connector = Connector()
    scheduler = scheduler_class(*(made if first == "reaper" else made[::-1]))(connector)
    Request.status = SimpleNamespace(WAITING_FOR_REMOTE_KVS=object())
    scheduler._update_from_kv_xfer_finished(output())
    scheduler.hold("a")
    clock.now = 10
    scheduler._update_after_schedule()
    for step in range(2000):  # what each leaves on the connector must not pile up
        reported = output("a", f"stranger{step}")
        scheduler._update_from_kv_xfer_finished(reported)
        assert reported.finished_sending == {"a", f"stranger{step}"}, (
            "the output has again what the connector left in it"
        )
    assert connector.reported[1:] == [{"a", f"stranger{step}"} for step in range(2000)], "the connector sees all"
    assert theirs.counters == {"send_late": 1, "send_unknown": 3999}
    assert "late" not in mine.counters, "one of the two keeps account of what was reaped"
    scheduler.hold("b")
    scheduler._update_from_kv_xfer_finished(output("a", "b"))
    assert scheduler.freed == ["a", "b"]


@pytest.mark.parametrize("first", ["reaper", "stale", "alone"])
def test_a_send_that_comes_late_is_not_that_of_a_later_request_with_the_id(first: str, clock: Clock) -> None:
    made = [reaper.wrappers(context()), stale.wrappers(PatchContext("stale-finished-recving", {}, {}, lambda: None))]
    order = {"reaper": made, "stale": made[::-1], "alone": made[:1]}
    scheduler = scheduler_class(*order[first])(Connector())
    scheduler.hold("a")
    clock.now = 10
    scheduler._update_after_schedule()
    scheduler.hold("a")
    scheduler._update_from_kv_xfer_finished(output("a"))
    assert scheduler.freed == ["a"], "the later one's blocks are still being sent"
    scheduler._update_from_kv_xfer_finished(output("a"))
    assert scheduler.freed == ["a", "a"]


def test_a_request_whose_id_is_held_is_parked_before_the_hold_is_reaped(clock: Clock) -> None:
    """Else it would be let in as it comes, and a third with its id would be one too many."""
    made = [reaper.wrappers(context()), stale.wrappers(PatchContext("stale-finished-recving", {}, {}, lambda: None))]
    scheduler = scheduler_class(*made)(Connector())
    scheduler.hold("a")
    clock.now = 10
    second, third = Request("a"), Request("a")
    scheduler.add_request(second)
    scheduler.add_request(third)
    assert scheduler._livepatch_transfers.parked == {"a": [second, third]}
    scheduler._update_after_schedule()
    assert scheduler.requests == {"a": second}
    assert scheduler._livepatch_transfers.parked == {"a": [third]}


def test_what_the_other_patch_knows_to_be_loading_is_not_reaped(clock: Clock) -> None:
    """The release does not say so where a request ends by its own last token."""
    scheduler = scheduler_class(reaper.wrappers(context()))(Connector())
    request = Request("a")
    scheduler.add_request(request)
    scheduler._livepatch_transfers = SimpleNamespace(held={"a": SimpleNamespace(receive=True)})
    scheduler._free_request(request, False)
    clock.now = 1000
    scheduler._update_after_schedule()
    assert scheduler.freed == []


def test_what_was_reaped_is_left_out_also_once_the_patch_stands_aside(clock: Clock) -> None:
    livepatch = context()
    scheduler = scheduler_class(reaper.wrappers(livepatch))(Connector())
    scheduler.hold("a")
    clock.now = 10
    scheduler._update_after_schedule()
    assert scheduler.freed == ["a"]
    livepatch.withdraw()
    scheduler._update_from_kv_xfer_finished(output("a"))
    assert livepatch.counters["late"] == 1


@pytest.mark.parametrize(
    ("received", "waits", "late"),
    [("reaped", False, {"reaped"}), ("reaped", True, set()), ("stranger", False, set()), ("stranger", True, set())],
)
def test_only_a_receive_of_what_was_freed_here_is_late(received: str, waits: bool, late: set[str]) -> None:
    """One that a later request of the same id waits for lets that request run; of others the release knows itself."""
    watch = reaper.Watch(10)
    watch.reaped["reaped"] = 1
    reported = output()
    reported.finished_recving = {received}
    assert watch.late(reported, {received: Request(received)} if waits else {}) == late


def test_a_receive_that_ends_begins_the_hold_for_the_send(clock: Clock) -> None:
    scheduler = scheduler_class(reaper.wrappers(context()))(Connector())
    request = Request("a")
    scheduler.add_request(request)
    scheduler._free_request(request, True)
    clock.now = 1000
    scheduler._update_after_schedule()
    assert scheduler.freed == [], "its KV still arrives"
    arrived = output()
    arrived.finished_recving = {"a"}
    scheduler._update_from_kv_xfer_finished(arrived)
    clock.now = 1009
    scheduler._update_after_schedule()
    assert scheduler.freed == []
    clock.now = 1010
    scheduler._update_after_schedule()
    assert scheduler.freed == ["a"]


class Worker:
    """As much of NIXL's worker as hears of leases."""

    def __init__(self, **leases: float) -> None:
        self._reqs_to_send = dict(leases)


def test_a_lease_that_ran_out_is_put_before_one_that_is_renewed(clock: Clock) -> None:
    livepatch = context(asked=False)
    hear = reaper.wrappers(livepatch)[f"{reaper.NIXL}.pull_worker:NixlPullConnectorWorker._get_new_notifs"]
    worker = Worker(renewed=40, ran_out=30, later=60)
    clock.now = 29
    assert hear(lambda: {"done"}, worker) == {"done"}
    assert list(worker._reqs_to_send) == ["renewed", "ran_out", "later"], "nothing is stranded"
    clock.now = 30  # to the moment
    hear(set, worker)
    assert worker._reqs_to_send == {"ran_out": 30, "renewed": 40, "later": 60}
    assert list(worker._reqs_to_send) == ["ran_out", "renewed", "later"]
    assert livepatch.counters == {"stranded": 1}
