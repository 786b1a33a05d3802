"""lmcache-in-process without LMCache: what its wrappers ask, answer, and tell the workers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm_livepatch.patches.lmcache_in_process import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext

STAGES = 2


@pytest.fixture
def made() -> Callable[..., Any]:
    """Call a wrapper by its method's name; the original returns what it was given."""
    context = PatchContext("lmcache-in-process", {}, {"asserts": True}, lambda: None)
    wrappers = {target.rpartition(".")[2]: wrapper for target, wrapper in patch.wrappers(context).items()}

    def call(name: str, instance: Any, *args: Any) -> Any:
        return wrappers[name](lambda *given: given, instance, *args)

    return call


class LoadSpec(NamedTuple):
    vllm_cached_tokens: int
    lmcache_cached_tokens: int
    can_load: bool


class Connector(SimpleNamespace):
    """Its module, this one, has what LMCache's has."""


def connector(client: Any, engine: Any = None, loads_async: bool = False) -> Any:
    return Connector(
        lookup_client=client,
        lmcache_engine=engine,
        async_loading=loads_async,
        load_specs={"a": object()},
        _requests_priority={"a": 1},
        _vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=STAGES)),
    )


def request(name: str = "a") -> Any:
    return SimpleNamespace(request_id=name, status="aborted", kv_transfer_params=None, sampling_params=None)


def synchronous(**found: int) -> Any:
    client = SimpleNamespace(reqs_status=dict(found))
    client.clear_lookup_status = client.reqs_status.pop
    return client


def asynchronous(status: dict[str, int | None], aborted: set[str]) -> Any:
    client = SimpleNamespace(reqs_status=status, aborted_lookups=aborted, lock=threading.Lock())
    client.cancel_lookup = aborted.add
    return client


def build(scheduler: Any) -> set[str]:
    """What the next step tells the workers to give back."""
    context = PatchContext("lmcache-in-process", {}, {}, lambda: None)
    wrapper = patch.wrappers(context)[f"{patch.CONNECTOR}.build_connector_meta"]
    metadata = SimpleNamespace()
    wrapper(lambda *_: metadata, scheduler, object())
    return set(getattr(metadata, patch.UNUSED, ()))


def test_no_engine(made: Callable[..., Any]) -> None:
    """The original does not learn that the request was aborted, and sees the rest of it."""
    shown, blocks = made("request_finished", connector(synchronous()), request(), [1])
    assert (shown.status, shown.request_id, shown.kv_transfer_params, blocks) == (None, "a", None, [1])
    with pytest.raises(AttributeError):
        shown.nothing  # noqa: B018


def test_an_engine(made: Callable[..., Any]) -> None:
    """Where LMCache can clean up by itself it is shown the request as it is."""
    aborted = request()
    assert made("request_finished", connector(synchronous(), engine=object()), aborted, [])[0] is aborted
    client = asynchronous({}, set())
    assert made("request_finished", connector(client, object(), loads_async=True), aborted, [])[0] is aborted
    around = SimpleNamespace(actual_lookup_client=client)
    assert made("request_finished", connector(around, object(), loads_async=True), aborted, [])[0] is not aborted


def test_pins_are_given_back_once(made: Callable[..., Any]) -> None:
    """The workers are told in the next step; until they have done it, the id misses."""
    scheduler = connector(synchronous(a=64))
    made("request_finished", scheduler, request(), [])
    assert not scheduler.lookup_client.reqs_status
    assert not scheduler.load_specs
    assert not scheduler._requests_priority
    assert made("get_num_new_matched_tokens", scheduler, request(), 0) == 0
    assert build(scheduler) == {"a"}
    for _ in range(STAGES + 1):
        assert made("get_num_new_matched_tokens", scheduler, request(), 16) == 0
        assert scheduler.load_specs.pop("a") == LoadSpec(16, 0, can_load=False), "it could not come back preempted"
        assert made("get_num_new_matched_tokens", scheduler, request("b"), 0) != 0
        assert build(scheduler) == set()
    assert made("get_num_new_matched_tokens", scheduler, request(), 0) != 0


def test_not_looked_up(made: Callable[..., Any]) -> None:
    scheduler = connector(synchronous())
    made("request_finished", scheduler, request(), [])
    assert build(scheduler) == set()


def test_a_worker_gives_back(made: Callable[..., Any]) -> None:
    given: list[str] = []
    engine = SimpleNamespace(lookup_unpin=given.append)
    for metadata in (None, SimpleNamespace(), SimpleNamespace(**{patch.UNUSED: {"a"}})):
        worker = SimpleNamespace(lmcache_engine=engine, _parent=SimpleNamespace(_connector_metadata=metadata))
        assert made("get_finished", worker, {"x"}) == ({"x"},)
    assert given == ["a"]


def test_cancelled_only_where_it_is_looked_up(made: Callable[..., Any]) -> None:
    """An id that LMCache does not look up would stay among the aborted ones for ever."""
    client = asynchronous({"a": None}, set())
    scheduler = connector(SimpleNamespace(actual_lookup_client=client), loads_async=True)
    made("request_finished", scheduler, request("other"), [])
    assert client.aborted_lookups == set()
    made("request_finished", scheduler, request("a"), [])
    assert client.aborted_lookups == {"a"}


@pytest.mark.parametrize("status", [{"a": None}, {}])
def test_given_up_and_not_answered(made: Callable[..., Any], status: dict[str, int | None]) -> None:
    assert made("lookup_cache", asynchronous(status, {"a"}), "a") == 0
    assert made("lookup_cache", asynchronous(status, {"b"}), "a") == ("a",)


def test_given_up_and_answered(made: Callable[..., Any]) -> None:
    """LMCache's own code gives back what the workers found, and asks anew."""
    assert made("lookup_cache", asynchronous({"a": 0}, {"a"}), "a") == ("a",)


def test_not_started(made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Metadata: ...

    monkeypatch.setattr("sys.modules", {__name__: SimpleNamespace(LMCacheConnectorMetadata=Metadata)})
    scheduler = type("Impl", (), {"__module__": __name__, "lookup_client": None})()
    assert made("get_num_new_matched_tokens", scheduler, request(), 0) == 0
    assert made("update_state_after_alloc", scheduler, request(), 0) is None
    assert isinstance(made("build_connector_meta", scheduler, object()), Metadata)
    for name in ("start_load_kv", "save_kv_layer", "wait_for_save"):
        assert made(name, SimpleNamespace(lmcache_engine=None), 1) is None
        assert made(name, SimpleNamespace(lmcache_engine=object()), 1) == (1,)


class Memory:
    def __init__(self) -> None:
        self.pins = self.references = 1

    @property
    def is_pinned(self) -> bool:
        return self.pins > 0

    def unpin(self) -> None:
        self.pins -= 1

    def ref_count_down(self) -> None:
        self.references -= 1


class Prefetch:
    """An engine that prefetched chunks in two tiers; the second of three is copied."""

    def __init__(self, removes: bool, fails: bool = False) -> None:
        self.chunks = [(name, Memory()) for name in "abc"]
        self.future: Future[Any] = Future()
        if fails:
            self.future.set_exception(KeyError("a"))
        else:
            self.future.set_result([self.chunks[:2], self.chunks[2:]])
        self.events = {("loading", "r"): self.future}
        self.event_manager, self.remove_after_retrieve = self, removes

    def get_event_future(self, kind: str, name: str) -> Any:
        return self.events[kind, name]

    def pop_event(self, kind: str, name: str) -> Any:
        return self.events.pop((kind, name))

    def add_event(self, kind: str, name: str, future: Any) -> None:
        self.events[kind, name] = future

    def update_event_status(self, kind: str, name: str, status: str) -> None:
        assert (status, (kind, name) in self.events) == ("done", True)

    def load(self, **facts: bool) -> Any:
        context = PatchContext("lmcache-in-process", {}, facts, lambda: None)
        wrapper = patch.wrappers(context)[f"{patch.ENGINE}._async_process_tokens_internal"]

        def original(*args: Any, **kwargs: Any) -> Any:
            for name, memory in self.chunks:
                if name != "b":
                    memory.ref_count_down()
            return [(*self.chunks[1], 2, 4)], 8

        return wrapper(original, self, [1, 2], req_id="r")


@pytest.fixture
def _cache_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"EventType": SimpleNamespace(LOADING="loading"), "EventStatus": SimpleNamespace(DONE="done")}
    monkeypatch.setitem(sys.modules, "lmcache.v1.cache_engine", SimpleNamespace(**kinds))


@pytest.mark.usefixtures("_cache_engine")
@pytest.mark.parametrize(("removes", "gives_back"), [(False, False), (True, True), (True, False)])
def test_what_was_copied_is_left_to_the_clean_up(removes: bool, gives_back: bool) -> None:
    engine = Prefetch(removes)
    assert engine.load(gives_back_copied=gives_back) == ([(*engine.chunks[1], 2, 4)], 8)
    assert engine.events["loading", "r"].result() == [[engine.chunks[1]]]
    assert [(memory.pins, memory.references) for _, memory in engine.chunks] == [(0, 0), (1, 1), (0, 0)]


@pytest.mark.usefixtures("_cache_engine")
def test_nothing_is_left_to_the_clean_up() -> None:
    """From LMCache 0.5.2 on the caller gives back what was copied; 0.3.15 has ended the event itself."""
    engine = Prefetch(removes=False)
    engine.load(gives_back_copied=True)
    assert engine.events == {}
    assert [(memory.pins, memory.references) for _, memory in engine.chunks] == [(0, 0), (1, 1), (0, 0)]
    engine = Prefetch(removes=False)
    engine.load(ends_event=True)
    assert [memory.pins for _, memory in engine.chunks] == [1, 1, 1]


@pytest.mark.usefixtures("_cache_engine")
def test_a_prefetch_that_failed() -> None:
    engine = Prefetch(removes=False, fails=True)
    engine.load()
    assert engine.events == {("loading", "r"): engine.future}


class Given(dict[str, Any]):
    """A client's parameters, and how often they were looked through."""

    looked = 0

    def __iter__(self) -> Any:
        self.looked += 1
        return super().__iter__()


def test_a_clients_parameters_are_looked_through_once(made: Callable[..., Any]) -> None:
    """There may be a million, and a request that waits for blocks is asked for in each step."""
    given, asked = Given(a=1), request()
    asked.kv_transfer_params = given
    asked.sampling_params = SimpleNamespace(extra_args={"kv_transfer_params": given})
    for _ in range(3):
        made("get_num_new_matched_tokens", connector(synchronous()), asked, 0)
    assert (given.looked, asked.kv_transfer_params) == (1, given)
    others = Given({"lmcache.tag.a": [], "b": 1})  # a session's next prompt has sampling parameters of its own
    asked.sampling_params = SimpleNamespace(extra_args={"kv_transfer_params": others})
    made("get_num_new_matched_tokens", connector(synchronous()), asked, 0)
    assert asked.sampling_params.extra_args == {"kv_transfer_params": {"b": 1}}
    assert asked.kv_transfer_params is given
