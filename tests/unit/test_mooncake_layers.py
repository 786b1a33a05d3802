"""`mooncake-layerwise` by layers: which memory is whose, what leaves while a step is computed, and what counts as sent."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.mooncake_layerwise import early
from vllm_livepatch.patches.mooncake_layerwise import wrappers as patch
from vllm_livepatch.patches.mooncake_layerwise.computed import PROGRESS
from vllm_livepatch.patches.mooncake_layerwise.layers import OTHERS, Layers
from vllm_livepatch.patches.mooncake_layerwise.parts import Group
from vllm_livepatch.sitecustomize.context import PatchContext

from tests.unit import test_mooncake_layerwise as base
from tests.unit.support import awaited


class Cache:
    """As much of a tensor as says where it lies: rows of ten elements, `apart` from one to the next."""

    device = SimpleNamespace(type="cpu")

    def __init__(self, begin: int, apart: int = 10, element: int = 1) -> None:
        self.begin, self.apart, self.element = begin, apart, element
        self.shape = (10, 10)

    def stride(self) -> tuple[int, int]:
        return self.apart, 1

    def data_ptr(self) -> int:
        return self.begin

    def element_size(self) -> int:
        return self.element


CACHES = {"a": Cache(100), "b": Cache(200), "c": Cache(300)}
NAMES = {100: "a", 200: "b", 300: "c", 900: "other"}
LEAST = early.LAYERS_BYTES
"""What layers bring at least; most tests set it to 0."""


envs = base.envs
"""By the release's name: the patch finds it in the module of the worker's class."""


class Worker(base.Worker):
    """Of three layers, and memory that is no layer's; what it writes are (prefill's block, decode's, the layers)."""

    def __init__(self, context: PatchContext) -> None:
        super().__init__(context)
        self.regions = [SimpleNamespace(base_addr=address) for address in NAMES]
        self.livepatch_writes = early.Writes(context, self, Layers(CACHES))
        setattr(self, patch.WRITES, self.livepatch_writes)
        self.refuses: list[str] = []  # to build for these names' rests

    async def _built(self, ready: Any, meta: Any, local: Any, remote: Any) -> Any:
        assert local == remote
        layers = " ".join(NAMES[region.base_addr] for region in local)
        if len(local) < len(NAMES) and ready[0][0] in self.refuses and not ready[0][1].p_req_id:
            return [], [], [], [ready[0][0]], "no"
        pairs, *others = await super()._built(ready, meta, local, remote)
        return [(*pair, layers) for pair in pairs if layers], *others

    def beginning(self, transfer: str, blocks: list[int], total: int) -> None:
        self.livepatch_writes.beginning({"whole": {transfer: (blocks, total)}, "back": [], "over": [], "held": {}})

    async def saved(self, *layers: str) -> None:
        for layer in layers:
            self.livepatch_writes.saved(layer, None)
        await base.turns()


EVERY = "a b c other"


def run(case: Callable[[Worker], Awaitable[None]], aside: int = 0) -> PatchContext:
    logged: list[str] = []
    context = PatchContext("mooncake-layerwise", {"BY": "auto"}, {}, lambda: None, failed=logged.append)

    async def main() -> None:
        await asyncio.wait_for(case(Worker(context)), 20)

    asyncio.run(main())
    assert len(logged) == aside
    return context


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "LAYERS_BYTES", 0)


def test_each_layer_leaves_when_it_is_computed_and_the_rest_at_the_end() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11, 12])
        worker.beginning("t", [1, 2], 3)
        await base.turns()
        assert worker.written == []
        await worker.saved("a")
        assert worker.written == [[(1, 10, "a"), (2, 11, "a")]]
        await worker.saved("b", "c")
        assert worker.written[1:] == [[(1, 10, "b c"), (2, 11, "b c")]]
        worker.whole("t", [1, 2], 3)
        await base.turns()
        assert worker.written[2:] == [[(1, 10, "other"), (2, 11, "other")]], "what is no layer's"
        worker.end("t", [1, 2, 3])
        await asked
        assert worker.written[3:] == [[(3, 12, EVERY)]]
        assert worker.answers == [["FINISH", ["d"], [], None]]
        assert list(worker.reqs_need_send) == worker.finished == ["t"]

    assert run(case).counters == {"early": 2, "layers": 4}


def test_what_has_not_left_of_a_block_leaves_after_the_step_before_what_is_computed_next() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11])
        worker.beginning("t", [1], 2)
        await worker.saved("b")
        worker.open.clear()
        await worker.saved("a")
        worker.whole("t", [1], 2)
        worker.beginning("t", [1, 2], 2)
        await worker.saved("a")
        worker.open.set()
        await base.turns(60)
        assert worker.written == [[(1, 10, "b")], [(1, 10, "a")], [(1, 10, "c other")], [(2, 11, "a")]]
        worker.end("t", [1, 2])
        await asked
        assert worker.written[4:] == [[(2, 11, "b c other")]]

    run(case)


def test_at_the_end_only_the_layers_that_have_not_left_are_sent_and_nothing_answers_before() -> None:
    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = worker.ask("d", "t", [10, 11])
        worker.beginning("t", [1], 2)
        await base.turns()
        await worker.saved("a")
        assert worker.written == [[(1, 10, "a")]]
        worker.whole("t", [1], 2)
        worker.end("t", [1, 2])
        await base.turns()
        assert (len(worker.written), worker.answers) == (1, [])
        worker.open.set()
        await asked
        assert worker.written[1:] == [[(1, 10, "b c other"), (2, 11, EVERY)]]

    run(case)


def test_blocks_that_are_given_back_count_for_nothing() -> None:
    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = worker.ask("d", "t", [10, 11])
        worker.beginning("t", [1], 2)
        await base.turns()
        await worker.saved("a")
        back = asyncio.ensure_future(worker.livepatch_writes.back(["t"]))
        await base.turns()
        assert not back.done()
        worker.open.set()
        await back
        await worker.saved("b")
        assert len(worker.written) == 1
        worker.end("t", [1, 6])
        await asked
        assert worker.written[1:] == [[(1, 10, EVERY), (6, 11, EVERY)]]

    run(case)


def test_who_asks_when_the_memory_was_taken_away_amid_a_step_is_sent_nothing_of_it() -> None:
    """As of a step that raised: nobody tells that it has been computed."""

    async def case(worker: Worker) -> None:
        worker.beginning("t", [1], 2)
        await worker.saved("a")
        await worker.livepatch_writes.asleep()
        asked = worker.ask("d", "t", [10, 11])
        await base.turns()
        assert worker.written == []
        worker.end("t", [1, 2])
        await asked
        assert worker.written == [[(1, 10, EVERY), (2, 11, EVERY)]]

    run(case)


def test_nothing_of_a_prefill_that_is_over_is_begun() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11])
        worker.beginning("t", [1], 2)
        await base.turns()
        worker.livepatch_writes.over(["t"])
        await worker.saved("a")
        assert worker.written == []
        worker.end("t", [1, 2])
        await asked

    run(case)


def test_nothing_more_is_begun_of_a_prompt_of_one_block_that_is_over_while_a_layer_of_it_is_written() -> None:
    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = worker.ask("d", "t", [10])
        worker.beginning("t", [1], 1)
        await base.turns()
        await worker.saved("a", "b")
        await worker.saved("c")
        assert worker.written == [[(1, 10, "a b")]]
        worker.livepatch_writes.over(["t"])
        worker.open.set()
        await base.turns()
        assert len(worker.written) == 1
        worker.end("t", [1])
        await asked
        assert worker.written[1:] == [[(1, 10, "c other")]]

    run(case)


def test_after_an_error_of_its_own_between_two_writes_the_release_sends_the_rest() -> None:
    """The error is reported, and no part waits for a place for ever."""

    def raises(part: Any) -> Any:
        raise RuntimeError("own")

    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = [worker.ask(f"d{number}", f"t{number}", [10 + number, 20]) for number in range(3)]
        for number in range(3):
            worker.whole(f"t{number}", [number], 2)
        await base.turns()
        assert worker.written == [[(0, 10, EVERY)], [(1, 11, EVERY)]]
        worker.livepatch_writes._next = raises  # type: ignore[method-assign]
        worker.open.set()
        await base.turns(60)
        assert len(worker.written) == 2
        for number in range(3):
            worker.end(f"t{number}", [number, 9])
        await asyncio.gather(*asked)
        assert sorted(worker.written[2:]) == [[(2, 12, EVERY), (9, 20, EVERY)], *[[(9, 20, EVERY)]] * 2]
        assert [answer[1] for answer in worker.answers] == [["d0"], ["d1"], ["d2"]]

    run(case, aside=1)


def test_what_an_early_write_brought_is_forgotten_when_it_has_ended() -> None:
    """The release's own ask, at the address of an early one's, is for all layers."""

    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11])
        worker.beginning("t", [1], 2)
        await base.turns()
        await worker.saved("a")
        assert (worker.written, worker.livepatch_writes._only) == ([[(1, 10, "a")]], {})
        worker.end("t", [1, 2])
        await asked
        assert worker.livepatch_writes._asks == {}

    run(case)


def test_layers_bring_no_less_than_a_mebibyte_while_their_step_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "LAYERS_BYTES", LEAST)

    async def case(worker: Worker) -> None:
        worker.livepatch_writes._block_bytes = 3 << 19  # half a MiB of each of three layers
        asked = worker.ask("d", "t", [10, 11])
        worker.beginning("t", [1], 2)
        await base.turns()
        await worker.saved("a")
        assert worker.written == []
        await worker.saved("b")
        assert worker.written == [[(1, 10, "a b")]]
        worker.end("t", [1, 2])
        await asked

    run(case)


def test_what_is_none_of_the_layers_or_of_no_step_is_passed_over() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11])
        await worker.saved("a")
        worker.beginning("t", [1], 2)
        await worker.saved("a draft model's")
        await worker.saved("a")
        assert worker.written == [[(1, 10, "a")]]
        worker.end("t", [1, 2])
        await asked

    assert run(case).counters == {"layers": 1}


def test_a_layer_that_a_step_computes_twice_counts_for_nothing_and_no_more_leaves_by_layers() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11, 12])
        worker.beginning("t", [1], 3)
        await base.turns()
        await worker.saved("a", "b")
        await worker.saved("c")
        assert worker.written == [[(1, 10, "a b")], [(1, 10, "c")]]
        await worker.saved("a", "b")
        worker.whole("t", [1], 3)
        await base.turns()
        assert worker.written[2:] == [[(1, 10, EVERY)]]
        worker.beginning("t", [1, 2], 3)
        await worker.saved("a")
        assert len(worker.written) == 3
        worker.end("t", [1, 2, 3])
        await asked
        assert worker.written[3:] == [[(2, 11, EVERY), (3, 12, EVERY)]]

    run(case)


def test_layers_of_a_later_step_are_none_of_blocks_whose_step_is_not_known_to_have_ended() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11])
        worker.beginning("t", [1], 2)
        await base.turns()
        await worker.saved("a")
        worker.beginning("t", [1, 2], 2)
        await worker.saved("b")
        assert worker.written == [[(1, 10, "a")]]
        worker.whole("t", [1, 2], 2)
        await base.turns(60)
        assert worker.written[1:] == [[(1, 10, "b c other")], [(2, 11, EVERY)]]
        worker.end("t", [1, 2])
        await asked
        assert len(worker.written) == 3

    run(case)


@pytest.mark.parametrize("blocks", [[9, 2], [1, 2, 3]], ids=["others", "more"])
def test_what_the_release_is_to_send_otherwise_is_sent_whole(blocks: list[int]) -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11])
        worker.beginning("t", [1], 2)
        await base.turns()
        await worker.saved("a")
        worker.end("t", blocks)
        await asked
        assert worker.written[1:] == [[(one, other, EVERY) for one, other in zip(blocks[-2:], [10, 11], strict=True)]]

    run(case)


def test_where_the_release_does_not_send_the_rest_all_is_sent() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11])
        worker.beginning("t", [1], 2)
        await base.turns()
        await worker.saved("a")
        worker.refuses.append("d")
        worker.whole("t", [], 2)
        worker.end("t", [1, 2])
        await asked
        assert worker.written[1:] == [[(1, 10, EVERY), (2, 11, EVERY)]]
        assert worker.answers == [["FINISH", ["d"], [], None]]

    run(case, aside=1)


def test_a_request_of_which_a_layer_s_write_failed_is_not_answered() -> None:
    async def case(worker: Worker) -> None:
        worker.answer = -1
        asked = worker.ask("d", "t", [10, 11])
        worker.beginning("t", [1], 2)
        await base.turns()
        await worker.saved("a")
        worker.answer = 0
        await worker.saved("b")
        worker.whole("t", [1], 2)
        worker.end("t", [1, 2])
        await asked
        assert (worker.written, worker.answers, worker.finished) == ([[(1, 10, "a")]], [], [])

    assert run(case).counters == {"failed": 1}


def test_several_layers_leave_in_one_write_of_a_useful_size_and_no_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "LAYERS_BYTES", 4)
    monkeypatch.setattr(early, "PIECE_BYTES", 8)

    async def case(worker: Worker) -> None:
        worker.livepatch_writes._block_bytes = 6  # two of each layer
        worker.livepatch_writes._piece = 1
        asked = worker.ask("d", "t", [10, 11, 12, 13])
        worker.beginning("t", [1, 2, 3, 4], 4)
        await base.turns()
        await worker.saved("a")
        assert worker.written == [[(1, 10, "a"), (2, 11, "a"), (3, 12, "a")]], "of one layer no more than a piece"
        await worker.saved("b", "c")
        await base.turns(60)
        assert [pairs[0][2] for pairs in worker.written] == ["a", "b", "c"], "of two it would be more"
        worker.end("t", [1, 2, 3, 4])
        await asked

    async def small(worker: Worker) -> None:
        worker.livepatch_writes._block_bytes = 6
        asked = worker.ask("d", "t", [10, 11])
        worker.beginning("t", [1], 2)
        await base.turns()
        await worker.saved("a")
        assert worker.written == []
        await worker.saved("b")
        assert worker.written == [[(1, 10, "a b")]]
        worker.end("t", [1, 2])
        await asked

    run(case)
    run(small)


def test_a_layer_of_blocks_that_are_larger_than_a_write_is_to_be_leaves_when_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a model with many layers whose blocks are of many tokens: one layer at a time."""
    monkeypatch.setattr(early, "PIECE_BYTES", 8)

    async def case(worker: Worker) -> None:
        worker.livepatch_writes._block_bytes = 60  # twenty of each layer
        worker.livepatch_writes._piece = 1
        asked = worker.ask("d", "t", [10, 11])
        worker.beginning("t", [1], 2)
        await base.turns()
        await worker.saved("a")
        assert worker.written == [[(1, 10, "a")]]
        await worker.saved("b", "c")
        await base.turns(60)
        assert worker.written[1:] == [[(1, 10, "b")], [(1, 10, "c")]]
        worker.end("t", [1, 2])
        await asked

    run(case)


@pytest.mark.parametrize("kept", [True, False])
def test_a_layer_is_read_when_the_device_has_computed_it_and_the_release_would_still_write(kept: bool) -> None:
    computed, logged = asyncio.Event(), list[str]()

    async def case(worker: Worker) -> None:
        loop = asyncio.get_running_loop()

        def synchronize() -> None:
            logged.append("asked")
            asyncio.run_coroutine_threadsafe(computed.wait(), loop).result()

        asked = worker.ask("d", "t", [10, 11])
        worker.beginning("t", [1], 2)
        await base.turns()
        worker.livepatch_writes.saved("a", SimpleNamespace(synchronize=synchronize))
        await awaited(lambda: logged)
        assert worker.written == []
        entry = worker.reqs_need_send["t"]
        if not kept:
            del worker.reqs_need_send["t"]
        computed.set()
        await awaited(lambda: not any(part.under_way for part in worker.livepatch_writes._parts()))
        assert worker.written == ([[(1, 10, "a")]] if kept else [])
        entry.local_block_ids = [[1, 2]]
        entry.ready.set()
        await asked

    run(case)


def test_memory_is_a_layer_s_where_no_other_s_lies_in_it() -> None:
    layers = Layers(CACHES)
    assert layers.names == ["a", "b", "c", OTHERS]
    regions = [SimpleNamespace(base_addr=address) for address in (100, 199, 200, 299, 400, 99)]
    assert layers.only(["a"], regions, "012345") == (regions[:2], ["0", "1"])
    assert layers.only(["b", OTHERS], regions, "012345") == (regions[2:], ["2", "3", "4", "5"])
    wide = Layers({"a": Cache(100, element=2), "b": Cache(300)})
    assert wide.only(["a"], [SimpleNamespace(base_addr=299)], "0")[1] == ["0"]
    for other in (Cache(100), Cache(199), Cache(110, apart=300), Cache(1, element=2)):
        assert patch.layers_of({"a": Cache(100), "z": other}) is None


async def asked_of_a_connector(context: PatchContext) -> tuple[Any, Any, Any]:
    """A prefill worker and its connector, of which decode has asked for two blocks; a step is to compute the first."""
    worker = Worker(context)
    worker.is_kv_consumer, worker.sender_loop = False, asyncio.get_running_loop()
    worker.device_kv_caches = CACHES
    connector = base.Connector(worker, [])
    worker._registered.look(None, connector, CACHES)
    worker.livepatch_writes = getattr(worker, patch.WRITES)
    asked = worker.ask("d", "t", [10, 11])
    await base.turns()
    progress = {"whole": {"t": ([1], 2)}, "back": [], "over": [], "held": {}}
    connector._connector_metadata = SimpleNamespace(**{PROGRESS: progress})
    return worker, connector, asked


@pytest.mark.parametrize("by", ["auto", "layer", "chunk"])
def test_the_connector_hears_of_layers_where_they_are_to_leave(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "leaves_early", lambda *args: Group())
    context = PatchContext("mooncake-layerwise", {"BY": by}, {}, lambda: None)

    async def main() -> None:
        worker, connector, asked = await asked_of_a_connector(context)
        connector.bind_connector_metadata(connector._connector_metadata)
        connector.save_kv_layer("b", None, None)
        await base.turns()
        assert worker.written == ([] if by == "chunk" else [[(1, 10, "b")]])
        connector._connector_metadata = SimpleNamespace()  # of a step that computes nothing for others
        connector.save_kv_layer("b", None, None)
        await base.turns()
        worker.end("t", [1, 2])
        await asked
        assert worker.written[-1][0] == (1, 10, EVERY if by == "chunk" else "a c other")

    asyncio.run(main())
    assert not context.aside


class Stream:
    """A device's queue; each thread has one of its own that is current."""

    def __init__(self) -> None:
        self.queued: list[str] = []


class Cuda:
    """As much of `torch.cuda` as events take. `waited` has behind which work each was that somebody waited for."""

    def __init__(self) -> None:
        self.of_threads: dict[int, Stream] = {}
        self.waited: list[list[str] | None] = []
        cuda = self

        class Event:
            def __init__(self) -> None:
                self.behind: list[str] | None = None  # who waits for one that was not recorded waits for nothing

            def record(self, stream: Stream | None = None) -> None:
                self.behind = [*(stream or cuda.current_stream()).queued]

            def synchronize(self) -> None:
                cuda.waited.append(self.behind)

        self.Event = Event

    def current_stream(self) -> Stream:
        return self.of_threads.setdefault(threading.get_ident(), Stream())


def test_before_blocks_are_read_all_is_awaited_that_their_step_had_queued_on_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patch, "leaves_early", lambda *args: Group())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=(cuda := Cuda())))
    monkeypatch.setattr(Cache, "device", SimpleNamespace(type="cuda"))
    context = PatchContext("mooncake-layerwise", {"BY": "auto"}, {}, lambda: None)
    wait_for_save: Any = patch.wrappers(context)[f"{patch.CONNECTOR}.wait_for_save"]

    async def main() -> None:
        worker, connector, asked = await asked_of_a_connector(context)

        def begins() -> None:
            connector.bind_connector_metadata(connector._connector_metadata)
            cuda.current_stream().queued.append("layer a")
            connector.save_kv_layer("a", None, None)

        def ends() -> None:
            cuda.current_stream().queued.append("layers b and c")
            wait_for_save.look(connector)

        # The worker's thread is none of the loop's: there, another stream is the current one.
        with futures.ThreadPoolExecutor(1) as steps:
            for part, layers in ((begins, "a"), (ends, "b c other")):
                await asyncio.wrap_future(steps.submit(part))
                await base.turns()
                await asyncio.gather(*(part.under_way for part in worker.livepatch_writes._parts() if part.under_way))
                assert worker.written[-1] == [(1, 10, layers)]
        worker.end("t", [1, 2])
        await asked

    asyncio.run(main())
    assert cuda.waited == [["layer a"], ["layer a", "layers b and c"]]
    assert not context.aside


@pytest.mark.parametrize("by", ["auto", "layer", "chunk"])
def test_graphs_are_piecewise_where_each_layer_is_to_leave(by: str) -> None:
    context = PatchContext("mooncake-layerwise", {"BY": by}, {}, lambda: None)
    wrapper: Any = patch.wrappers(context)[f"{patch.BASE}.requires_piecewise_for_cudagraph"]
    mooncake, other = type("MooncakeConnector", (), {}), type("NixlConnector", (), {})
    assert wrapper(lambda config: False, mooncake, {}) is (by == "layer")
    assert wrapper(lambda config: False, other, {}) is False
    assert wrapper(lambda config: True, other, {}) is True
