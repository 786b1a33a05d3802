"""The faults inside the parts: what reaches the scheduler of what a worker finished, and how long a server takes."""

from __future__ import annotations

import asyncio
import importlib.util
import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import faults, options
from vllm_livepatch.tools.lab.topology import load

Step = Callable[..., tuple[set[str], set[str]]]


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, faults.PATCHES / name / "wrappers.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def worker(patch: Any, **options: Any) -> tuple[Step, PatchContext]:
    """A worker's step, wrapped: given what the connector says has finished, what leaves the worker."""
    context = PatchContext("fault", options, {}, lambda: None)
    (wrapper,) = patch.wrappers(context).values()

    def step(sent: set[str] | None = None, received: set[str] | None = None) -> tuple[set[str], set[str]]:
        @contextmanager
        def original() -> Iterator[Any]:
            output = SimpleNamespace(finished_sending=None, finished_recving=None)
            yield output
            output.finished_sending, output.finished_recving = sent, received

        with wrapper(original) as output:
            pass
        return set(output.finished_sending or ()), set(output.finished_recving or ())

    return step, context


def test_a_share_of_sends_is_lost_and_the_same_ones_each_time() -> None:
    patch = module("lost_completions")
    ids = {f"{number:03}" for number in range(200)}
    reported = []
    for _ in range(2):
        step, context = worker(patch, SHARE=0.5, SEED=1)
        sent, received = step(ids, {"received"})
        reported.append(sent)
        assert received == {"received"}
        assert context.counters == {"lost": 200 - len(sent), "passed_on": len(sent)}
        assert sent < ids
        assert 70 < len(sent) < 130
    assert reported[0] == reported[1]


@pytest.mark.parametrize(("share", "left"), [(0.0, {"a", "b"}), (1.0, set())])
def test_none_or_all_may_be_lost(share: float, left: set[str]) -> None:
    step, _ = worker(module("lost_completions"), SHARE=share, SEED=1)
    assert step({"a", "b"}) == (left, set())


def test_the_first_is_always_lost() -> None:
    step, _ = worker(module("lost_completions"), SHARE=0.001, SEED=1)
    assert step({"a"}) == (set(), set())
    assert step({"b"}) == ({"b"}, set())


def test_a_slow_transfer_is_logged_once_and_not_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    patch, clock = module("slow_transfer"), SimpleNamespace(now=0.0)
    monkeypatch.setattr(patch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    step, context = worker(patch, SECONDS=2.0)
    assert step({"a"}, {"b"}) == (set(), set())
    clock.now = 1.0
    assert step({"c"}) == (set(), set())
    clock.now = 2.0
    assert step() == ({"a"}, {"b"})
    clock.now = 3.0
    assert step() == ({"c"}, set())
    assert step() == (set(), set())
    assert context.counters == {"delayed": 3}


def test_a_slow_servers_calls_wait_first_and_are_served_then(monkeypatch: pytest.MonkeyPatch) -> None:
    patch, done = module("slow_lmcache"), list[object]()
    monkeypatch.setattr(patch, "time", SimpleNamespace(sleep=done.append))
    context = PatchContext("fault", {"SECONDS": 0.3}, {}, lambda: None)
    (wrapper,) = patch.wrappers(context).values()

    def served(number: int) -> str:
        done.append(number)
        return "served"

    assert wrapper(served, None, 7) == "served"
    assert done == [0.3, 7]
    assert context.counters == {"slowed": 1}


def test_a_late_request_waits_before_its_engine_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    patch, done = module("late_requests"), list[object]()

    async def sleep(seconds: float) -> None:
        done.append(seconds)

    monkeypatch.setattr(patch, "asyncio", SimpleNamespace(sleep=sleep))
    context = PatchContext("fault", {"SECONDS": 4.0, "SHARE": 1.0, "SEED": 1}, {}, lambda: None)
    (wrapper,) = patch.wrappers(context).values()

    async def add(request_id: str, prompt: str, params: Any) -> str:
        done.append(request_id)
        return "added"

    def asked(request_id: str, **transfer: bool) -> Any:
        params = SimpleNamespace(extra_args={"kv_transfer_params": transfer} if transfer else None)
        return asyncio.run(wrapper(add, None, request_id, "prompt", params=params))

    assert [asked("own"), asked("prefill", do_remote_decode=True)] == ["added", "added"]
    assert done == ["own", "prefill"]
    assert asked("decode", do_remote_prefill=True) == "added"
    assert done == ["own", "prefill", 4.0, "decode"]
    assert context.counters == {"late": 1}


def test_writes_share_a_link_and_take_their_time_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    patch, clock, slept = module("link"), SimpleNamespace(now=10.0, mine=True), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 3))
        clock.now += seconds * clock.mine

    monkeypatch.setattr(patch, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    context = PatchContext("fault", {"MB": 2.0, "FILE": ""}, {}, lambda: None)
    (wrapper,) = patch.wrappers(context).values()
    meanwhile: list[Any] = []

    def written(seconds: float, result: int = 0, *others: Any) -> Any:
        def write(session: str, sources: list[int], destinations: list[int], lengths: list[int]) -> int:
            clock.now += seconds
            for lengths in others:  # of another thread, in which time passes as well
                clock.mine = False
                meanwhile.append(wrapper(written(0.0), None, "other", [], [], lengths))
                clock.mine = True
            return result

        return write

    assert wrapper(written(0.25, 7), None, "peer", [], [], [1_000_000, 500_000]) == 7
    assert (slept, clock.now) == ([0.5], 10.75), "1.5 MB at 2 MB/s, of which it took a third itself"
    wrapper(written(0.0, 0, [2_000_000]), None, "peer", [], [], lengths=[1_000_000])
    assert (slept[1:], clock.now) == ([1.5, 0.5], 11.25), "the second waits for the first on the link, not the reverse"
    wrapper(written(9.0), None, "peer", [], [], [1_000_000])
    assert (slept[3:], clock.now) == ([0.0], 20.25), "the engine itself was slower"
    assert (meanwhile, context.counters) == ([0], {"kilobytes": 5500})


def test_a_link_is_as_a_file_says_from_one_write_to_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch, slept = module("link"), list[float]()
    monkeypatch.setattr(patch, "time", SimpleNamespace(monotonic=lambda: 10.0, sleep=slept.append))
    file = tmp_path / "link"
    context = PatchContext("fault", {"MB": 2.0, "FILE": str(file)}, {}, lambda: None)
    (wrapper,) = patch.wrappers(context).values()
    for megabytes in ("4", "0"):
        file.write_text(megabytes)
        assert wrapper(lambda *call: 7, None, "peer", [], [], [1_000_000]) == 7
    assert slept == [0.25]


def test_a_share_of_prefill_legs_is_refused_once_the_load_has_begun_before_its_engine_hears_of_it(
    tmp_path: Path,
) -> None:
    loading = tmp_path / "loading"
    context = PatchContext("fault", {"SHARE": 0.5, "SEED": 1, "AFTER": str(loading)}, {}, lambda: None)
    (wrapper,) = module("lost_prefills").wrappers(context).values()
    added: list[str] = []

    def release(request_id: str, prompt: str, params: Any) -> None:
        added.append(request_id)

    add = context.around(
        release, wrapper, of="the engine"
    )  # as a target is: an error that is not meant would end the fault

    def asked(request_id: str, **transfer: bool) -> bool:
        params = SimpleNamespace(extra_args={"kv_transfer_params": transfer} if transfer else None)
        try:
            add(request_id, "prompt", params=params)
        except ValueError:
            return False
        return True

    assert all(asked("undisturbed", do_remote_decode=True) for _ in range(20))
    loading.touch()
    assert all(asked("own") and asked("decode", do_remote_prefill=True) for _ in range(20))
    assert 5 < sum(asked("prefill", do_remote_decode=True) for _ in range(20)) == added.count("prefill") < 15
    assert context.counters == {"refused": 20 - added.count("prefill")}


class Reader:
    """A worker of NIXL's as far as reads are begun: those whose handshake has just ended wait in a queue of its own."""

    def __init__(self, patch: Any, **options: Any) -> None:
        self.context = PatchContext("fault", options, {}, lambda: None)
        self._start, self._read = patch.wrappers(self.context).values()
        self._ready_requests: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.begun: list[str] = []

    def step(self, *asked: str) -> list[str]:
        """A step in which these are asked for: what was begun in it."""
        self.begun = []
        self._start(self._original_start, self, asked)
        return self.begun

    def _original_start(self, asked: tuple[str, ...]) -> None:
        for request_id in asked:
            self._read(self._original_read, self, request_id, SimpleNamespace())
        while not self._ready_requests.empty():
            self._read(self._original_read, self, *self._ready_requests.get_nowait())

    def _original_read(self, request_id: str, meta: Any) -> None:
        self.begun.append(request_id)


def test_a_late_read_is_begun_once_by_the_workers_own_queue_and_not_before_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch, clock = module("late_reads"), SimpleNamespace(now=0.0)
    monkeypatch.setattr(patch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    reader = Reader(patch, SECONDS=2.0, SHARE=1.0, SEED=1)
    assert reader.step("a") == []
    clock.now = 1.0
    assert reader.step("b") == []
    clock.now = 2.0
    assert reader.step() == ["a"]
    clock.now = 3.0
    assert reader.step("c") == ["b"]
    assert reader.step() == []
    assert reader.context.counters == {"late": 3}


def test_a_share_of_reads_is_late_and_the_same_ones_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = module("late_reads")
    ids = [f"{number:03}" for number in range(200)]
    begun = []
    for _ in range(2):
        reader = Reader(patch, SECONDS=60.0, SHARE=0.5, SEED=1)
        begun.append(reader.step(*ids))
        assert reader.context.counters == {"late": 200 - len(begun[-1])}
    assert begun[0] == begun[1]
    assert 70 < len(begun[0]) < 130


def test_they_are_asked_for_by_name_with_a_number_or_without() -> None:
    assert faults.injected(["disconnects", "lost-completions", "slow-transfer=1.5", "kill-decode", "late-reads=3"]) == {
        "lost-completions": {"LIVEPATCH_LOST_COMPLETIONS": "on"},
        "slow-transfer": {"LIVEPATCH_SLOW_TRANSFER": "on", "LIVEPATCH_SLOW_TRANSFER_SECONDS": "1.5"},
        "late-reads": {"LIVEPATCH_LATE_READS": "on", "LIVEPATCH_LATE_READS_SECONDS": "3"},
    }
    assert faults.parse(["lost-completions=0.5", "slow-transfer"], ["decode"]) == (False, [])
    with pytest.raises(UserError, match="write lost-completions=SHARE, a number"):
        faults.injected(["lost-completions=many"])


@pytest.mark.parametrize("cpu", [True, False])
def test_mooncakes_worker_is_given_the_cpu_only_there_and_only_while_it_is_made(
    cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = module("mooncake_on_cpu")
    accelerator = SimpleNamespace(current_device_index=lambda: 3)
    release = ModuleType(patch.TARGET.partition(":")[0])
    vars(release).update(
        torch=SimpleNamespace(accelerator=accelerator), current_platform=SimpleNamespace(is_cpu=lambda: cpu)
    )
    monkeypatch.setitem(sys.modules, release.__name__, release)
    context = PatchContext("mooncake-on-cpu", {}, {}, lambda: None)
    (wrapper,) = patch.wrappers(context).values()
    seen: list[Any] = []

    def made(fails: bool) -> None:
        seen.append(accelerator.current_device_index())
        if fails:
            raise RuntimeError("Mooncake Transfer Engine initialization failed.")

    wrapper(made, None, False)
    with pytest.raises(RuntimeError, match="initialization"):
        wrapper(made, None, True)
    assert seen == ["cpu" if cpu else 3] * 2
    assert accelerator.current_device_index() == 3
    assert context.counters == ({"on_cpu": 1} if cpu else {})


@pytest.mark.parametrize(
    ("name", "modules"),
    [("mooncake_store_on_cpu", [""]), ("simple_offload_on_cpu", [".worker", ".copy_backend"])],
)
@pytest.mark.parametrize("cpu", [True, False])
def test_events_of_a_gpu_count_as_done_only_on_a_cpu(
    name: str, modules: list[str], cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = module(name)
    torch = SimpleNamespace(zeros=list)
    package = getattr(patch, "PACKAGE", None) or patch.MODULE
    releases = [ModuleType(package + suffix) for suffix in modules]
    for release in releases:
        vars(release)["torch"] = torch
        monkeypatch.setitem(sys.modules, release.__name__, release)
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: cpu))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    context = PatchContext(name.replace("_", "-"), {}, {}, lambda: None)
    (wrapper,) = patch.wrappers(context).values()
    assert [wrapper(lambda: "registered", None) for _ in range(2)] == ["registered"] * 2
    for release in releases:
        seen = vars(release)["torch"]
        assert (seen is torch) != cpu
        if cpu:
            event = getattr(seen, "Event", None) or seen.cuda.Event
            assert event().query()
            assert seen.zeros is list, "else it is torch"


def test_offloaded_blocks_are_copied_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy")
    patch = module("simple_offload_on_cpu")
    worker, backend = ModuleType(f"{patch.PACKAGE}.worker"), ModuleType(f"{patch.PACKAGE}.copy_backend")
    for release in (worker, backend):
        vars(release)["torch"] = SimpleNamespace()
        monkeypatch.setitem(sys.modules, release.__name__, release)
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    (wrapper,) = patch.wrappers(PatchContext("simple-offload-on-cpu", {}, {}, lambda: None)).values()
    wrapper(lambda: None, None)
    engine, host = numpy.arange(12).reshape(4, 3), numpy.zeros((2, 3), dtype=int)
    regions = vars(backend)["build_params"]({"layer": engine}, {"layer": host}, object(), src_access_order=1)
    vars(backend)["copy_blocks"]([3, 1], [0, 1], regions)
    assert host.tolist() == [[9, 10, 11], [3, 4, 5]]


def test_a_copy_of_the_offload_begins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = module("slow_offload")
    slept: list[float] = []
    monkeypatch.setattr(patch.time, "sleep", slept.append)
    context = PatchContext("slow-offload", {"SECONDS": 0.25}, {}, lambda: None)
    (wrapper,) = patch.wrappers(context).values()
    asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    asked.put("a copy")
    asked.put(None)
    wrapper(lambda q, device: slept.append(q.get()) or slept.append(q.get()), asked, "cpu")  # type: ignore[func-returns-value]
    assert slept == [0.25, "a copy", None]
    assert context.counters == {"delayed": 1}


@pytest.mark.parametrize("computed", [True, False])
def test_an_engine_pauses_after_a_step_that_computed_nothing(computed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = module("empty_steps")
    slept: list[float] = []
    monkeypatch.setattr(patch.time, "sleep", slept.append)
    context = PatchContext("empty-steps", {"SECONDS": 0.25}, {}, lambda: None)
    (wrapper,) = patch.wrappers(context).values()
    assert wrapper(lambda: computed, None) is computed
    assert slept == ([] if computed else [0.25])
    assert context.counters == ({} if computed else {"paused": 1})


def test_each_is_a_patch_that_is_never_on_by_itself() -> None:
    known = catalogue.load([faults.PATCHES])
    needed = {name for topology in options.names() for name in load(topology).changes}
    on_cpu = {"mooncake-on-cpu", "mooncake-store-on-cpu", "simple-offload-on-cpu"}
    assert needed == {*on_cpu, "multi-connector-metrics"}
    own = needed - set(catalogue.load())
    assert {known[name].patch.auto for name in own} == {"off"}
    assert not needed & set(faults.INJECTED)
    assert not set(faults.INJECTED) & set(catalogue.load())
    assert known["empty-steps"].patch.auto == "off"
    for name, option in faults.INJECTED.items():
        assert known[name].patch.auto == "off"
        assert option in {entry.name for entry in known[name].patch.options}
