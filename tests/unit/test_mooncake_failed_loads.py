"""`mooncake-failed-loads`: who is gone, whose word counts, and when a load that failed is reported.

The worker is a stand-in: what of a release is concerned is in tests/releases/test_mooncake_asks.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.mooncake_failed_loads import wrappers as patch
from vllm_livepatch.patches.mooncake_failed_loads.asks import blocks_of
from vllm_livepatch.patches.mooncake_failed_loads.held import CARRIER, HOLDS, LOADS, Holds, Keeper, Word, unpacked
from vllm_livepatch.patches.mooncake_failed_loads.lines import Line, Ports
from vllm_livepatch.sitecustomize.context import PatchContext

from tests.unit.support import awaited


class Status(IntEnum):
    FINISH, CONTINUE, ERROR = range(3)


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", port)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


class Again(Exception):
    """As ZMQ's."""


class ContextTerminated(Exception):
    """As ZMQ's."""


IN, OUT = 1, 2


@pytest.fixture(autouse=True)
def zmq(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for what the patch uses of ZMQ's module; options are their names."""
    names = ("IMMEDIATE", "TCP_KEEPALIVE", "TCP_KEEPALIVE_IDLE", "TCP_KEEPALIVE_INTVL", "TCP_KEEPALIVE_CNT", "EVENTS")
    constants = {name: name for name in names}
    module = SimpleNamespace(Again=Again, ContextTerminated=ContextTerminated, POLLIN=IN, POLLOUT=OUT, **constants)
    monkeypatch.setitem(sys.modules, "zmq", module)


class Socket:
    """A stand-in for a socket of ZMQ's: with IMMEDIATE it takes a message once it has a connection."""

    def __init__(self, connected: bool = True, receive: Callable[[], Awaitable[str]] | None = None) -> None:
        self.connected, self.closed, self.terminated = connected, False, False
        self.options: dict[str, int] = {}
        self.rcvtimeo, self.sndtimeo = 1, -1  # milliseconds
        self.recv: Any = receive
        self._connects, self.taken = asyncio.Event(), asyncio.Event()

    def setsockopt(self, option: str, value: int) -> None:
        self.options[option] = value

    def get(self, option: str) -> int:
        assert option == "EVENTS"
        if self.terminated:
            raise ContextTerminated
        return OUT if self.connected else 0

    def connect(self) -> None:
        self.connected = True
        self._connects.set()

    def send(self, data: bytes) -> asyncio.Future[None]:
        async def taken() -> None:
            if not self.connected:
                assert self.options["IMMEDIATE"] == 1
                try:
                    await asyncio.wait_for(self._connects.wait(), self.sndtimeo / 1000 if self.sndtimeo >= 0 else None)
                except asyncio.TimeoutError:
                    raise Again from None
            self.taken.set()

        return asyncio.ensure_future(taken())

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("answers", "expected"), [("refuses", True), ("accepts", False), ("silent", False)])
def test_a_port_that_is_silent_does_not_refuse(answers: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*place: Any) -> Any:
        await asyncio.Event().wait()

    with listening() as address:
        if answers == "accepts":
            assert asyncio.run(Ports(60).refuses(address)) is False
    if answers == "silent":
        monkeypatch.setattr(asyncio, "open_connection", silent)
    if answers != "accepts":
        assert asyncio.run(Ports(60 if expected else 0.01).refuses(address)) is expected


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:99999", "tcp://a[b:5000", "tcp://a..b:5000"])
def test_an_address_that_names_no_place_does_not_refuse(address: str) -> None:
    """ZMQ's `connect` takes each of these; who names a bootstrap server decides what it says."""
    assert asyncio.run(Ports(60).refuses(address)) is False


def test_requests_that_ask_at_one_time_share_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[Any] = []

    async def refused(*place: Any) -> Any:
        tries.append(place)
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", refused)
    ports = Ports(60)

    async def look() -> list[bool]:
        return list(
            await asyncio.gather(*(ports.refuses("tcp://host:1") for _ in range(3)), ports.refuses("tcp://b:2"))
        )

    assert asyncio.run(look()) == [True] * 4
    assert sorted(tries) == [("b", 2), ("host", 1)]
    assert asyncio.run(look()) == [True] * 4
    assert len(tries) == 4, "nothing is kept of a look before"
    assert not ports._tries


def test_a_request_has_left_when_zmq_has_taken_it() -> None:
    async def play() -> None:
        made = Socket(connected=False)
        line = Line(made, lambda: False, lambda: False)
        assert not line.left
        sent = made.send(b"a request")
        await asyncio.sleep(0)
        assert not line.left
        assert line.lease == 0.001, "what the release waits for an answer"
        made.connect()
        await sent
        assert line.left
        assert made.options["TCP_KEEPALIVE"] == 1

    asyncio.run(play())


@pytest.mark.parametrize("how", ["cancelled", "no connection in the release's time"])
def test_a_request_that_zmq_did_not_take_has_not_left(how: str) -> None:
    async def play() -> None:
        made = Socket(connected=False)
        line = Line(made, lambda: True, lambda: False)
        sent: Any = made.send(b"a request")
        await asyncio.sleep(0)
        if how == "cancelled":
            sent.cancel()
        with pytest.raises((Again, asyncio.CancelledError)):
            await sent
        assert not line.left

    asyncio.run(play())


def test_a_line_tells_for_how_long_no_connection_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("vllm_livepatch.patches.mooncake_failed_loads.lines.time.monotonic", lambda: clock.now)

    async def play() -> None:
        made = Socket()
        line = Line(made, lambda: False, lambda: False)

        def seen(at: float, connected: bool) -> tuple[bool, float]:
            clock.now, made.connected = at, connected
            return line.is_closed(), line.closed_for()

        assert [seen(100, True), seen(101, False), seen(105, False)] == [(False, 0), (True, 0), (True, 4)]
        assert [seen(106, True), seen(107, False), seen(108, False)] == [(False, 0), (True, 0), (True, 1)]

    asyncio.run(play())


def test_a_socket_is_kept_open_while_blocks_are_held_for_its_request() -> None:
    async def play() -> None:
        keeps = [True]
        made = Socket()
        line = Line(made, lambda: False, lambda: keeps[0])
        made.close()
        assert not made.closed
        line.end()
        assert made.closed
        other = Socket()
        Line(other, lambda: False, lambda: False)
        other.close()
        assert other.closed

    asyncio.run(play())


class Connector:
    """As the base class of connectors has it."""

    connector_worker: Any

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


class Decode:
    """A decode engine's worker that asks two workers of a prefill engine, for one request with two blocks."""

    def __init__(self, *, reports: bool = False, facts: dict[str, Any] | None = None) -> None:
        self.aside: list[str] = []
        options = {"LOOK_SECONDS": 0.05, "HELD_SHARE": 0.25}
        self.context = PatchContext(
            "mooncake-failed-loads", options, facts or {}, lambda: None, failed=self.aside.append
        )
        self.wrap = patch.wrappers(self.context)
        self.pull = SimpleNamespace(
            d_req_id="d", local_block_ids=[[3, 4]], remote_engine_id="p", pull_tasks_count=2, failed=False
        )
        self.reports: list[Any] = []
        self.tp_size = 1
        self._xfer_resp_decoder = SimpleNamespace(decode=lambda response: response)
        self.socket = Socket()
        self.async_zmq_ctx: Any = SimpleNamespace(socket=lambda kind: self.socket)
        self._remote_agents: dict[str, Any] = {"p": {0: {0: "tcp://one"}, 1: {0: "tcp://two"}}}
        self.finished_recving_reqs: set[str] = set()
        if reports:
            self._handle_failed_recv = self.tell

    def tell(self, pulls: Any, names: Any, reason: str) -> None:
        self.reports.append(sorted(names))

    def call(self, name: str, release: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.wrap[f"{patch.WORKER}.{name}"](release, self, *args, **kwargs)

    def ask(self, address: str, answers: Callable[[Any], Awaitable[None]]) -> asyncio.Future[Any]:
        """Ask one worker, which answers so: `answers` gets what takes an answer."""

        async def release(address: str, pulls: Any) -> None:
            made = self.async_zmq_ctx.socket("dealer")
            try:
                await made.send(b"an ask")
                await answers(lambda **fields: self._xfer_resp_decoder.decode(SimpleNamespace(**{**ANSWER, **fields})))
            finally:
                made.close()

        asked: Awaitable[Any] = self.call("receive_kv_from_single_worker", release, address, {"d": self.pull})
        return asyncio.ensure_future(asked)

    def reported(self) -> tuple[set[str], set[int]]:
        connector = Connector()
        connector.connector_worker = self
        self.wrap[f"{patch.CONNECTOR}.get_finished"].look(connector)
        return self.finished_recving_reqs, connector.get_block_ids_with_load_errors()


ANSWER = {"status": Status.FINISH, "ok_reqs": None, "err_reqs": None, "err_msg": None}


async def well(answer: Any) -> None:
    answer(ok_reqs=["d"])


async def failed(answer: Any) -> None:
    answer(err_reqs=["d"], err_msg="P num blocks less than D")


async def broken(answer: Any) -> None:
    answer(err_reqs=["d"], err_msg="Mooncake transfer engine returned -1")


async def left_out(answer: Any) -> None:
    answer()


async def refused(answer: Any) -> None:
    answer(status=Status.ERROR, err_msg="not paired")


@pytest.mark.parametrize("first", [failed, left_out, refused])
def test_a_failed_load_is_reported_when_the_last_worker_writes_no_more(first: Any) -> None:
    async def play() -> None:
        decode = Decode()
        decode.call("receive_kv", lambda engine, pulls: None, "p", {"d": decode.pull})
        await decode.ask("tcp://one", first)
        assert decode.reported() == (set(), set())
        await decode.ask("tcp://two", well)
        assert decode.reported() == ({"d"}, {3, 4})
        assert decode.context.counters == {"failed": 1}

    asyncio.run(play())


def test_what_went_well_everywhere_is_left_to_the_release() -> None:
    async def play() -> None:
        decode = Decode()
        decode.call("receive_kv", lambda engine, pulls: None, "p", {"d": decode.pull})
        await asyncio.gather(decode.ask("tcp://one", well), decode.ask("tcp://two", well))
        assert decode.reported() == (set(), set())

    asyncio.run(play())


def test_an_answer_that_names_a_request_as_failed_and_then_as_well_counts_as_failed_to_the_end() -> None:
    """To 0.18.1, of an ask for several requests of which one has too few blocks."""

    async def twice(answer: Any) -> None:
        first = answer(err_reqs=["d"], err_msg="P num blocks less than D")
        assert first.status is Status.CONTINUE, "else the release would not hear the second"
        assert answer(ok_reqs=["d", "other"]).ok_reqs == ["other"]

    async def play() -> None:
        decode = Decode(facts={"answers_twice": True})
        other = SimpleNamespace(
            **{**vars(decode.pull), "d_req_id": "other", "local_block_ids": [5], "pull_tasks_count": 1}
        )
        decode.pull.pull_tasks_count = 1
        pulls = {"d": decode.pull, "other": other}
        decode.call("receive_kv", lambda engine, pulls: None, "p", pulls)

        async def release(address: str, pulls: Any) -> None:
            await twice(lambda **fields: decode._xfer_resp_decoder.decode(SimpleNamespace(**{**ANSWER, **fields})))

        await decode.call("receive_kv_from_single_worker", release, "tcp://one", pulls)
        assert decode.reported() == ({"d"}, {3, 4})

    asyncio.run(play())


async def broken_beside_another(answer: Any) -> None:
    """From 0.19.1 on: of the same ask, one request has too few blocks, and the write for the others failed."""
    answer(err_reqs=["other", "d"], err_msg="P num blocks less than D; Mooncake transfer engine returned -1")


async def silent(answer: Any) -> None:
    await asyncio.Event().wait()


async def gives_up(answer: Any) -> None:
    """The release gave up: what it got cannot be read, say."""


@pytest.mark.parametrize("answers", [broken, broken_beside_another, silent, gives_up])
def test_to_0_29_what_may_still_be_written_waits_for_good_as_on_stock(answers: Any) -> None:
    """Nothing that decode sees shows that a prefill engine writes no more: its connection and its port can both be cut."""

    async def play() -> None:
        decode = Decode()
        decode.pull.pull_tasks_count = 1
        decode.call("receive_kv", lambda engine, pulls: None, "p", {"d": decode.pull})
        with listening() as address:
            pass
        decode._remote_agents["p"][0][0] = address
        ask = decode.ask(address, answers)
        for _ in range(5):
            await asyncio.sleep(0)
        decode.socket.connected = False
        await asyncio.wait_for(ask, 60)
        assert decode.reported() == (set(), set())
        assert ("p" in decode._remote_agents) == (answers is not silent), "asked for anew, where it may be back"
        assert decode.context.counters == {"held": 1, **({"closed": 1} if answers is silent else {})}
        assert decode.socket.closed
        assert not decode.aside

    asyncio.run(play())


@pytest.mark.parametrize("reports", [False, True])
def test_a_port_that_refuses_ends_no_wait_of_a_request_that_has_left(reports: bool) -> None:
    """As where a firewall refuses new connections: the one by which decode asked, and RDMA, go on."""

    async def play() -> None:
        decode = Held() if reports else Decode()
        decode.pull.pull_tasks_count = 1
        decode.call("receive_kv", lambda engine, pulls: None, "p", {"d": decode.pull})
        looks, enough = [0], asyncio.Event()
        own = decode.socket.get

        def look(option: str) -> int:
            looks[0] += 1
            if looks[0] == 5:
                enough.set()
            return own(option)

        decode.socket.get = look  # type: ignore[method-assign]

        async def late(answer: Any) -> None:
            await enough.wait()
            assert not decode.reports
            assert decode.reported() == (set(), set())
            answer(ok_reqs=["d"])

        with listening() as address:
            pass
        await asyncio.wait_for(decode.ask(address, late), 60)
        assert decode.context.counters == {}
        assert not decode.aside

    asyncio.run(play())


@pytest.mark.parametrize("reports", [False, True])
def test_a_request_that_has_not_left_is_reported_where_the_port_refuses(reports: bool) -> None:
    async def play() -> None:
        decode = Held() if reports else Decode()
        decode.pull.pull_tasks_count = 1
        decode.call("receive_kv", lambda engine, pulls: None, "p", {"d": decode.pull})
        decode.socket.connected, decode.socket.rcvtimeo = False, -1
        with listening() as address:
            pass
        decode._remote_agents["p"][0][0] = address
        await asyncio.wait_for(decode.ask(address, well), 60)
        assert decode.reports == ([["d"]] if reports else [])
        assert reports or decode.reported() == ({"d"}, {3, 4})
        assert "p" not in decode._remote_agents
        assert decode.context.counters == {"refused": 1, "failed": 1}
        assert decode.socket.closed
        assert not decode.aside

    asyncio.run(play())


def test_a_request_that_leaves_while_its_port_is_tried_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        decode = Held()
        decode.socket.connected, decode.socket.rcvtimeo = False, -1

        goes_on = asyncio.Event()

        async def refuses(address: str, seconds: float) -> bool:
            decode.socket.connect()
            await goes_on.wait()
            return True

        async def late(answer: Any) -> None:
            goes_on.set()
            for _ in range(5):
                await asyncio.sleep(0)
            await well(answer)

        monkeypatch.setattr("vllm_livepatch.patches.mooncake_failed_loads.lines._refuses", refuses)
        await asyncio.wait_for(decode.ask("tcp://one", late), 60)
        assert not decode.reports
        assert decode.context.counters == {}

    asyncio.run(play())


def test_a_worker_that_is_shut_down_waits_for_no_socket_of_ours() -> None:
    """ZMQ's context ends when its sockets are closed."""

    async def play() -> None:
        decode = Held()

        async def answers(answer: Any) -> None:
            await broken(answer)
            decode.socket.terminated = True

        await asyncio.wait_for(decode.ask("tcp://one", answers), 60)
        assert decode.socket.closed
        assert not decode.aside

    asyncio.run(play())


def test_to_0_29_what_was_never_sent_is_reported_at_once_though_prefill_is_well() -> None:
    async def play() -> None:
        decode = Decode()
        decode.pull.pull_tasks_count = 1
        decode.call("receive_kv", lambda engine, pulls: None, "p", {"d": decode.pull})

        async def release(address: str, pulls: Any) -> None:
            pass  # it had no socket, and has logged that

        with listening() as address:
            await asyncio.wait_for(
                decode.call("receive_kv_from_single_worker", release, address, {"d": decode.pull}), 60
            )
        assert decode.reported() == ({"d"}, {3, 4})
        assert decode.context.counters == {"failed": 1}

    asyncio.run(play())


@pytest.mark.parametrize(
    "error",
    [KeyError("no such rank"), NotImplementedError("of another size"), AssertionError("3 of 2"), ZeroDivisionError()],
)
@pytest.mark.parametrize(("blocks", "expected"), [([[3, 4]], ({"d"}, {3, 4})), ([], (set(), set()))])
def test_who_cannot_be_asked_has_nothing_to_answer(error: Exception, blocks: list[Any], expected: Any) -> None:
    """An ask for no blocks only lets go: no request waits for it."""

    def release(engine: str, pulls: Any) -> None:
        raise error

    decode = Decode()
    decode.pull.local_block_ids = blocks

    async def play() -> None:
        decode.call("receive_kv", release, "p", {"d": decode.pull})
        await asyncio.sleep(0)
        assert decode.reported() == expected
        assert "p" not in decode._remote_agents, "asked for anew: its workers register one by one"

    asyncio.run(play())


@pytest.mark.parametrize("answers", [well, failed])
def test_where_one_worker_is_not_known_those_asked_before_are_waited_for(answers: Any) -> None:
    """vLLM to 0.23.0 asks prefill's workers one by one, and the second has not registered yet."""

    async def play() -> None:
        decode = Decode()
        go_on = asyncio.Event()

        async def asking(address: str, pulls: Any) -> None:
            await decode.async_zmq_ctx.socket("dealer").send(b"an ask")
            await go_on.wait()
            await answers(lambda **fields: decode._xfer_resp_decoder.decode(SimpleNamespace(**{**ANSWER, **fields})))

        async def task() -> None:  # the wrapper of a coroutine is called when it is awaited
            await decode.call("receive_kv_from_single_worker", asking, "tcp://one", {"d": decode.pull})

        tasks = []

        def release(engine: str, pulls: Any) -> None:
            tasks.append(asyncio.ensure_future(task()))
            raise KeyError("no such rank")

        decode.call("receive_kv", release, "p", {"d": decode.pull})
        for _ in range(5):
            await asyncio.sleep(0)
        assert decode.reported() == (set(), set())
        go_on.set()
        await asyncio.gather(*tasks)
        assert decode.reported() == ({"d"}, {3, 4})
        assert decode.context.counters == {"failed": 1}

    asyncio.run(play())


def test_a_block_that_two_workers_may_write_is_held_once() -> None:
    holds = Holds()
    keys = [holds.hold("p", "r", [1, 2]), holds.hold("p", "r", [2, 3])]
    assert holds.blocks == 3
    holds.let_go(keys[0])
    assert holds.blocks == 2
    holds.let_go(keys[1])
    assert holds.blocks == 0


def test_what_is_held_and_over_is_reported_once() -> None:
    holds = Holds()
    key = holds.hold("p", "r", [1])
    holds.let_go(key)
    word = holds.word()
    assert word is not None
    assert (word.held, word.over) == ({key: ("r", frozenset({1}))}, {key})
    assert holds.word() is None


def test_what_is_left_out_beside_what_is_held_is_reported_at_once() -> None:
    async def play() -> None:
        decode = Decode()
        decode.pull.pull_tasks_count = 1
        other = SimpleNamespace(**{**vars(decode.pull), "d_req_id": "other", "local_block_ids": [5]})
        pulls = {"d": decode.pull, "other": other}
        decode.call("receive_kv", lambda engine, pulls: None, "p", pulls)

        async def release(address: str, pulls: Any) -> None:
            await broken(lambda **fields: decode._xfer_resp_decoder.decode(SimpleNamespace(**{**ANSWER, **fields})))

        await asyncio.wait_for(decode.call("receive_kv_from_single_worker", release, "tcp://one", pulls), 60)
        assert decode.reported() == ({"other"}, {5})

    asyncio.run(play())


@pytest.mark.parametrize("settles", [False, True])
def test_from_0_30_a_load_whose_connection_was_closed_is_reported_when_nobody_else_writes(settles: bool) -> None:
    """0.33.0 counts the workers itself. What prefill may still write is held for as long as the release waits."""

    async def play() -> None:
        decode = Held(settles)
        decode.pull.pull_tasks_count = 2
        decode.call("receive_kv", lambda engine, pulls: None, "p", {"d": decode.pull})
        decode.socket.rcvtimeo = 200
        one = decode.socket
        asked = decode.ask("tcp://one", silent)
        await one.taken.wait()
        one.connected = False
        word = await awaited(decode.word)
        assert [name for name, _ in word.held.values()] == ["d"]
        assert decode.reports == ([["d"]] if settles else [])
        decode.socket = Socket()
        await decode.ask("tcp://two", well)
        assert decode.reports == [["d"]]
        assert decode.word() is None, "held on"
        await asyncio.wait_for(asked, 60)
        assert decode.word().over == set(word.held)
        assert one.closed
        assert decode.context.counters["closed"] == decode.context.counters["given_back"] == 1
        assert not decode.aside

    asyncio.run(play())


def test_what_is_held_comes_back_sooner_than_that_only_beyond_the_share_and_when_stock_had_freed_it() -> None:
    """As of a host that vanished: no connection of its own ever ends."""

    async def play() -> None:
        decode = Held()
        holds = vars(decode)[HOLDS]
        decode.socket.rcvtimeo = 1
        ask = decode.ask("tcp://one", broken)
        word = await awaited(decode.word)
        looks = [0]
        own = decode.socket.get

        def look(option: str) -> int:
            looks[0] += 1
            return own(option)

        decode.socket.get = look  # type: ignore[method-assign]
        await awaited(lambda: looks[0] >= 3)
        assert decode.word() is None
        assert not ask.done()
        holds.hold("another", "x", range(10, 14))  # with these, six of twenty
        await asyncio.wait_for(ask, 60)
        assert decode.word().over == set(word.held)
        assert decode.context.counters == {"held": 1, "over_share": 1, "given_back": 1}
        assert not decode.aside

    asyncio.run(play())


def test_within_the_release_s_time_nothing_is_freed_though_more_than_the_share_is_held() -> None:
    async def play() -> None:
        decode = Held()
        vars(decode)[HOLDS].hold("another", "x", range(10, 18))
        decode.socket.rcvtimeo = 3_600_000
        ask = decode.ask("tcp://one", broken)
        looks, enough = [0], asyncio.Event()

        def look(option: str) -> int:
            looks[0] += 1
            if looks[0] == 4:
                enough.set()
            return 0

        decode.socket.get = look  # type: ignore[method-assign]
        await asyncio.wait_for(enough.wait(), 60)
        assert decode.word().over == set()
        assert not ask.done()
        ask.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ask

    asyncio.run(play())


@pytest.mark.parametrize("order", ["refused first", "refused last"])
def test_from_0_30_to_0_32_a_load_that_one_worker_refuses_is_reported_with_the_last(order: str) -> None:
    async def play() -> None:
        decode = Decode(reports=True)
        decode.call("receive_kv", lambda engine, pulls: None, "p", {"d": decode.pull})
        with listening() as first, listening() as second:

            async def refuses(answer: Any) -> None:
                answer(err_reqs=["d"], err_msg="P num blocks less than D")
                decode._handle_failed_recv(asked[0], ["d"], "P num blocks less than D")

            asked: list[Any] = []

            async def ask(address: str, answers: Any) -> None:
                async def release(address: str, pulls: Any) -> None:
                    asked[:] = [pulls]
                    await answers(lambda **fields: decode._xfer_resp_decoder.decode(SimpleNamespace(**ANSWER | fields)))

                await decode.call("receive_kv_from_single_worker", release, address, {"d": decode.pull})

            one, other = (refuses, well) if order == "refused first" else (well, refuses)
            await ask(first, one)
            assert decode.reports in ([], [[]])
            await ask(second, other)
        assert decode.reports[-1] == ["d"]
        assert [names for names in decode.reports if names] == [["d"]]
        assert decode.context.counters == ({"held": 1} if order == "refused first" else {})
        assert not decode.aside

    asyncio.run(play())


def test_from_0_30_to_0_32_only_what_another_worker_may_write_is_counted_as_held() -> None:
    """Of two loads that one worker of prefill's refuses, the other may still write for one."""

    async def play() -> None:
        decode = Decode(reports=True)
        alone = SimpleNamespace(**{**vars(decode.pull), "d_req_id": "alone", "pull_tasks_count": 1})
        pulls = {"alone": alone, "d": decode.pull}
        decode.call("receive_kv", lambda engine, pulls: None, "p", pulls)

        async def refuses(address: str, asked: Any) -> None:
            names = [*asked]
            refused = {"err_reqs": names, "err_msg": "P num blocks less than D"}
            decode._xfer_resp_decoder.decode(SimpleNamespace(**{**ANSWER, **refused}))
            decode._handle_failed_recv(asked, names, "P num blocks less than D")

        with listening() as address:
            await asyncio.wait_for(decode.call("receive_kv_from_single_worker", refuses, address, pulls), 60)
        assert [names for names in decode.reports if names] == [["alone"]]
        assert decode.context.counters == {"held": 1}
        assert not decode.aside

    asyncio.run(play())


def test_what_was_never_asked_for_is_reported_at_once() -> None:
    """As by the release where the bootstrap server does not know the prefill engine."""

    async def play() -> None:
        decode = Decode(reports=True)
        decode.call("receive_kv", lambda engine, pulls: None, "p", {"d": decode.pull})
        await decode.ask("tcp://one", well)
        decode._handle_failed_recv({"d": decode.pull}, ["d"], "remote engine_id not found")
        assert decode.reports == [["d"]]

    asyncio.run(play())


def test_an_error_while_an_answer_is_read_is_not_the_release_s() -> None:
    async def play() -> None:
        decode = Decode()
        decode.call("receive_kv", lambda engine, pulls: None, "p", {"d": decode.pull})
        del decode.pull._livepatch_load.left

        async def answers(answer: Any) -> None:
            assert answer(err_reqs=["d"], err_msg="few").err_reqs == ["d"]

        with contextlib.suppress(AttributeError):
            await decode.ask("tcp://one", answers)
        assert decode.context.aside
        assert "reading an answer" in decode.aside[0]

    asyncio.run(play())


# From 0.30.0 on: the request goes on, and the blocks are held


@pytest.fixture(autouse=True)
def carrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for vLLM's class that carries what workers say."""
    module: Any = ModuleType(CARRIER)
    module.SimpleCPUOffloadWorkerMetadata = lambda events: SimpleNamespace(completed_store_events=events)
    monkeypatch.setitem(sys.modules, CARRIER, module)


class Held(Decode):
    """A worker whose connector was made with the patch, of 0.33.0 (or before), and what it says with a step."""

    def __init__(self, settles: bool = True) -> None:
        super().__init__(reports=True, facts={"settles_each_ask": True} if settles else {})
        self.kv_cache_config = SimpleNamespace(num_blocks=20)
        module = sys.modules[type(self).__module__]
        module.MooncakeConnectorWorker = SimpleNamespace(_handle_failed_recv=None)  # type: ignore[attr-defined]
        self.connector = SimpleNamespace(connector_worker=self, build_connector_worker_meta=lambda: None)
        self.wrap[f"{patch.CONNECTOR}.__init__"].look(None, self.connector)
        self.pull.pull_tasks_count = 1
        self.call("receive_kv", lambda engine, pulls: None, "p", {"d": self.pull})

    def word(self) -> Any:
        carrier = self.connector.build_connector_worker_meta()
        return carrier if carrier is None else unpacked(carrier)

    def report(self, pulls: Any, reason: str) -> None:
        """As the release, which reports what an answer names."""
        self._handle_failed_recv(pulls, ["d"], reason)


@pytest.mark.parametrize("settles", [False, True])
def test_of_a_write_that_failed_the_blocks_are_held_whatever_is_answered_later(settles: bool) -> None:
    async def play() -> None:
        decode = Held(settles)

        async def answers(answer: Any) -> None:
            answer(status=Status.CONTINUE, err_reqs=["d"], err_msg="few; Mooncake transfer engine returned -1")
            answer(status=Status.FINISH)

        ask = decode.ask("tcp://one", answers)
        word = await awaited(decode.word)
        ((name, blocks),) = word.held.values()
        assert (name, blocks, word.over) == ("d", {3, 4}, set())
        assert not ask.done()
        assert not decode.socket.closed, "its connection is watched"
        assert decode.word() is None, "said once"
        decode.socket.connected = False
        await asyncio.wait_for(ask, 60)
        assert decode.word().over == set(word.held)
        assert decode.context.counters["held"] == decode.context.counters["given_back"] == 1
        assert not decode.aside

    asyncio.run(play())


@pytest.mark.parametrize("settles", [False, True])
@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"status": Status.CONTINUE, "err_reqs": ["d"], "err_msg": "few"}, False),
        ({"status": Status.ERROR, "err_msg": "not paired"}, False),
        ({"status": SimpleNamespace(name="LAYOUT_MISS"), "err_msg": "not cached"}, False),
        ({"status": Status.CONTINUE, "ok_reqs": ["other"], "err_msg": None}, True),
    ],
)
def test_what_prefill_has_refused_is_not_held_and_what_has_no_answer_is(
    fields: dict[str, Any], holds: bool, settles: bool
) -> None:
    async def play() -> None:
        decode = Held(settles)

        async def release(address: str, pulls: Any) -> None:
            pulls = pulls.copy() if settles else pulls
            await decode.async_zmq_ctx.socket("dealer").send(b"an ask")
            decode._xfer_resp_decoder.decode(SimpleNamespace(**{**ANSWER, **fields}))
            decode.report(pulls, fields["err_msg"] or "transfer failed")

        with listening() as address:
            ask = asyncio.ensure_future(
                decode.call("receive_kv_from_single_worker", release, address, {"d": decode.pull})
            )
            await awaited(lambda: decode.reports)
            assert (decode.word() is not None) == holds
            decode.socket.connected = False
        await asyncio.wait_for(ask, 60)
        assert not decode.aside

    asyncio.run(play())


@pytest.mark.parametrize("settles", [False, True])
@pytest.mark.parametrize("sent", [[], ["a layout that is missed"]])
def test_what_was_never_sent_is_not_held(sent: list[str], settles: bool) -> None:
    """Nor what was sent to a worker of prefill's that had not the layout, and could not be sent again."""

    async def play() -> None:
        decode = Held(settles)

        async def release(address: str, pulls: Any) -> None:
            for _ in sent:
                await decode.async_zmq_ctx.socket("dealer").send(b"an ask")
                missed = {"status": SimpleNamespace(name="LAYOUT_MISS"), "err_msg": "not cached"}
                decode._xfer_resp_decoder.decode(SimpleNamespace(**{**ANSWER, **missed}))
            decode.report(pulls, "transfer failed: too many open files")

        with listening() as address:
            await asyncio.wait_for(
                decode.call("receive_kv_from_single_worker", release, address, {"d": decode.pull}), 60
            )
        assert decode.word() is None
        assert decode.reports[0] == ["d"]
        assert not decode.aside

    asyncio.run(play())


@pytest.mark.parametrize(("blocks", "waits"), [([[3, 4]], True), ([[]], False)])
def test_an_answer_that_is_overdue_is_listened_for(
    blocks: list[Any], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        decode = Held()
        decode.pull.local_block_ids = blocks
        comes = asyncio.Event()

        async def receive() -> str:
            if made.rcvtimeo != -1:
                raise Again
            await comes.wait()
            return "answer"

        made = Socket(receive=receive)
        decode.async_zmq_ctx = SimpleNamespace(socket=lambda kind: made)

        async def release(address: str, pulls: Any) -> None:
            heard = decode.async_zmq_ctx.socket("dealer")
            await heard.send(b"an ask")
            with contextlib.suppress(Again):
                assert await heard.recv() == "answer"
                decode._xfer_resp_decoder.decode(SimpleNamespace(**{**ANSWER, "ok_reqs": ["d"]}))

        with listening() as address:
            ask = asyncio.ensure_future(
                decode.call("receive_kv_from_single_worker", release, address, {"d": decode.pull})
            )
            if waits:
                await awaited(lambda: decode.reports)
                assert decode.reports == [["d"]]
                word = decode.word()
                assert [name for name, _ in word.held.values()] == ["d"]
                comes.set()
            await asyncio.wait_for(ask, 60)
            if waits:
                assert decode.word().over == set(word.held)
            else:
                assert decode.word() is None
        assert not decode.aside

    asyncio.run(play())


def test_an_engine_is_asked_for_anew_though_all_of_an_ask_was_reported_before_it_was_gone() -> None:
    """0.33.0 takes out of an ask what is reported."""

    async def play() -> None:
        decode = Held()
        asked: list[Any] = []

        async def release(address: str, pulls: Any) -> None:
            asked.append(pulls.copy())
            await decode.async_zmq_ctx.socket("dealer").send(b"an ask")
            decode._xfer_resp_decoder.decode(
                SimpleNamespace(**{**ANSWER, "err_reqs": ["d"], "err_msg": "Mooncake transfer engine returned -1"})
            )
            asked[0].pop("d")

        with listening() as address:
            decode._remote_agents["p"][0][0] = address
            ask = asyncio.ensure_future(
                decode.call("receive_kv_from_single_worker", release, address, {"d": decode.pull})
            )
            while not decode.context.counters:  # held
                await asyncio.sleep(0)
            assert "p" in decode._remote_agents
            decode.socket.connected = False
        await asyncio.wait_for(ask, 60)
        assert "p" not in decode._remote_agents
        assert not decode.aside

    asyncio.run(play())


def test_after_an_error_of_its_own_an_answer_that_is_overdue_is_the_release_s(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        decode = Held()
        setattr(decode, HOLDS, object())

        async def receive() -> str:
            raise Again

        decode.async_zmq_ctx = SimpleNamespace(socket=lambda kind: Socket(receive=receive))

        async def release(address: str, pulls: Any) -> None:
            asking = decode.async_zmq_ctx.socket("dealer")
            await asking.send(b"an ask")
            with pytest.raises(Again):
                await asking.recv()
            decode._xfer_resp_decoder.decode(SimpleNamespace(**{**ANSWER, "ok_reqs": ["d"]}))

        wrapper = decode.wrap[f"{patch.WORKER}.receive_kv_from_single_worker"]
        with listening() as address:
            await asyncio.wait_for(wrapper(release, decode, address, pull_metas={"d": decode.pull}), 60)
        assert len(decode.aside) == 1

    asyncio.run(play())


@pytest.mark.parametrize("why", ["begun before the patch", "aside", "no blocks"])
def test_an_answer_that_is_overdue_is_the_release_s_where_the_patch_has_no_part_in_it(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release gives up as it would, by an error that it knows, and nothing is held for it."""

    async def play() -> None:
        decode = Held()
        raised: list[str] = []

        async def receive() -> str:
            raise Again

        decode.async_zmq_ctx = SimpleNamespace(socket=lambda kind: Socket(receive=receive))

        async def release(address: str, pulls: Any) -> None:
            asking = decode.async_zmq_ctx.socket("dealer")
            await asking.send(b"an ask")
            if why == "aside":
                decode.context.stand_aside("elsewhere", RuntimeError())
            try:
                await asking.recv()
            except Exception as error:  # as the release, which takes any for the end of the ask
                raised.append(type(error).__name__)
            decode._xfer_resp_decoder.decode(SimpleNamespace(**{**ANSWER, "ok_reqs": ["d"]}))

        async def ask(pull: Any) -> None:
            asked = decode.call("receive_kv_from_single_worker", release, address, {"d": pull})
            await asyncio.wait_for(asked, 60)

        with listening() as address:
            if why == "begun before the patch":
                await decode.ask(address, well)  # since then the worker's sockets are followed
                pull = SimpleNamespace(**vars(decode.pull))
                del pull._livepatch_load
                await ask(pull)
            else:
                if why == "no blocks":
                    decode.pull.local_block_ids = []
                await ask(decode.pull)
        assert raised == ["Again"]
        assert "held" not in decode.context.counters
        assert len(decode.aside) == (why == "aside")

    asyncio.run(play())


@pytest.mark.parametrize("fields", [{"ok_reqs": ["d"]}, {"err_reqs": ["d"], "err_msg": "few"}, {}])
def test_to_0_29_an_answer_that_comes_late_is_taken(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill engine lives on: it has said all that it will."""

    async def play() -> None:
        decode = Decode()
        decode.pull.pull_tasks_count = 1
        decode.call("receive_kv", lambda engine, pulls: None, "p", {"d": decode.pull})

        async def receive() -> str:
            if made.rcvtimeo != -1:
                raise Again
            return "answer"

        made = Socket(receive=receive)
        decode.async_zmq_ctx = SimpleNamespace(socket=lambda kind: made)

        async def release(address: str, pulls: Any) -> None:
            asking = decode.async_zmq_ctx.socket("dealer")
            await asking.send(b"an ask")
            await asking.recv()
            assert decode.reported() == (set(), set())
            decode._xfer_resp_decoder.decode(SimpleNamespace(**{**ANSWER, **fields}))

        with listening() as address:
            await asyncio.wait_for(
                decode.call("receive_kv_from_single_worker", release, address, {"d": decode.pull}), 60
            )
        assert decode.reported() == ((set(), set()) if "ok_reqs" in fields else ({"d"}, {3, 4}))
        assert decode.context.counters["held"] == 1
        assert not decode.aside

    asyncio.run(play())


@pytest.mark.parametrize(
    ("held", "asked"),
    [
        ({"p": 6}, False),
        ({"p": 5}, True),  # no more than a quarter of twenty
        ({"other": 20}, True),  # of p nothing is held
        ({"other": 6, "p": 2}, True),  # less than p's part, of two engines
        ({"other": 6, "p": 3}, False),
    ],
)
def test_an_engine_is_asked_unless_more_than_its_part_is_held_for_it(held: dict[str, int], asked: bool) -> None:
    """Another engine's failures do not keep a healthy one from being asked."""
    decode = Held()
    first = 0
    for engine, blocks in held.items():
        vars(decode)[HOLDS].hold(engine, "before", range(first, first + blocks))
        first += blocks
    released: list[Any] = []
    decode.call("receive_kv", lambda engine, pulls: released.extend(pulls.values()), "p", {"d": decode.pull})
    assert [blocks_of(pull) for pull in released] == [{3, 4} if asked else set()]


def test_so_many_held_loads_are_too_many_whatever_their_blocks() -> None:
    """Each keeps a socket."""
    holds = Holds()
    keys = [holds.hold("p", "before", [number]) for number in range(LOADS + 1)]
    assert (holds.too_many_of("p", 1e6), holds.too_many_of("other", 1e6)) == (True, False)
    holds.let_go(keys[0])
    assert not holds.too_many(1e6)
    for key in keys[1:]:
        holds.let_go(key)
    assert not [*holds._blocks, *holds._loads, *holds._now], "nothing outlives its engine"


@pytest.mark.parametrize(("blocks", "asked"), [(5, True), (6, False)])
@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}, {"pp_size": 2}], ids=["alone", "ranks", "stages"])
def test_where_too_many_blocks_are_held_only_what_lets_go_is_asked(
    blocks: int, asked: bool, sizes: dict[str, int]
) -> None:
    """Who lets go speaks for all of decode's workers, of which others may load: one of several does not."""
    decode = Held()
    vars(decode).update(sizes)
    vars(decode)[HOLDS].hold("p", "before", range(blocks))
    empty = SimpleNamespace(**{**vars(decode.pull), "local_block_ids": [[]], "d_req_id": "empty"})
    released: dict[str, Any] = {}
    decode.call("receive_kv", lambda engine, pulls: released.update(pulls), "p", {"d": decode.pull, "e": empty})
    assert released["e"] is empty
    assert ("d" in released) == (asked or not sizes)
    if "d" in released:
        assert released["d"].local_block_ids == ([[3, 4]] if asked else []), "asked for nothing, prefill lets go"
        assert released["d"].failed != asked, "and the release reports no end of it"
    assert decode.pull.local_block_ids == [[3, 4]]
    assert decode.reports == ([] if asked else [["d"]])
    assert not decode.aside


@pytest.mark.parametrize("given", [0, 1, 2])
@pytest.mark.parametrize("blocks", [5, 6], ids=["room", "no room"])
def test_a_load_may_be_begun_with_arguments_by_name(given: int, blocks: int) -> None:
    decode = Held()
    vars(decode)[HOLDS].hold("p", "before", range(blocks))
    asked = {"remote_engine_id": "p", "pull_metas": {"d": decode.pull}}
    args = [asked.pop(name) for name in [*asked][:given]]
    released: list[Any] = []

    def release(remote_engine_id: str, pull_metas: Any) -> None:
        released.append((remote_engine_id, [*pull_metas]))

    decode.call("receive_kv", release, *args, **asked)
    assert released == [("p", ["d"])]
    assert not decode.aside


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_worker_may_be_asked_with_arguments_by_name(given: int) -> None:
    async def play() -> None:
        decode = Held()
        asked = {"worker_addr": "nobody:1", "pull_metas": {"d": decode.pull}}
        args = [asked.pop(name) for name in [*asked][:given]]
        released: list[Any] = []

        async def release(worker_addr: str, pull_metas: Any) -> None:
            released.append((worker_addr, [*pull_metas]))

        await asyncio.wait_for(decode.call("receive_kv_from_single_worker", release, *args, **asked), 60)
        assert released == [("nobody:1", ["d"])]
        assert not decode.aside

    asyncio.run(play())


@pytest.mark.parametrize("given", [0, 1, 2])
def test_an_engine_that_its_bootstrap_server_does_not_know_may_be_looked_for_with_arguments_by_name(given: int) -> None:
    """To 0.29.0 the release logs that, and its requests would wait for ever."""

    async def play() -> None:
        decode = Decode()
        asked = {"remote_engine_id": "unknown", "pull_metas": {"d": decode.pull}}
        args = [asked.pop(name) for name in [*asked][:given]]
        released: list[Any] = []

        async def release(remote_engine_id: str, pull_metas: Any) -> None:
            released.append((remote_engine_id, [*pull_metas]))

        await decode.call("handle_new_engine_id", release, *args, **asked)
        assert released == [("unknown", ["d"])]
        assert decode.reported() == ({"d"}, {3, 4})

    asyncio.run(play())


def test_where_nothing_is_left_to_ask_for_nobody_is_asked() -> None:
    decode = Held()
    decode.tp_size = 2
    vars(decode)[HOLDS].hold("p", "before", range(6))
    released: list[Any] = []
    decode.call("receive_kv", lambda *asked: released.append(asked), "p", {"d": decode.pull})
    assert released == []
    assert decode.reports == [["d"]]


def test_what_is_held_no_more_does_not_count() -> None:
    decode = Held()
    holds = vars(decode)[HOLDS]
    holds.let_go(holds.hold("p", "before", range(6)))
    released: list[list[str]] = []
    decode.call("receive_kv", lambda engine, pulls: released.append(sorted(pulls)), "p", {"d": decode.pull})
    assert released == [["d"]]
    assert not decode.reports


class Block:
    def __init__(self, number: int, null: bool = False) -> None:
        self.block_id, self.is_null, self.references = number, null, 1


class Pool:
    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.references += 1

    def free_blocks(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.references -= 1


@pytest.mark.parametrize(("status", "left"), [("WAITING_FOR_REMOTE_KVS", 0), ("FINISHED_ABORTED", 32)])
def test_the_scheduler_keeps_the_blocks_and_the_request_begins_anew(status: str, left: int) -> None:
    aside: list[str] = []
    keeper = Keeper(PatchContext("mooncake-failed-loads", {}, {}, lambda: None, failed=aside.append))
    blocks = [Block(2), Block(3), Block(4), Block(0, null=True)]
    request = SimpleNamespace(request_id="d", num_computed_tokens=32, status=SimpleNamespace(name=status))
    keeper.bind_gpu_block_pool(lambda pool: None, None, Pool())
    keeper.update_state_after_alloc(
        lambda *args: None, None, request, SimpleNamespace(blocks=(blocks[:2], blocks[2:])), 64
    )

    def reports(*words: Word, ended: set[str] | None = None) -> None:
        events = {key: value for word in words for key, value in word.packed().items()}
        carrier = SimpleNamespace(completed_store_events=events) if words else None
        output = SimpleNamespace(kv_connector_worker_meta=carrier, finished_recving=ended)
        keeper.update_connector_output(lambda output: None, None, output)

    # Two workers, one of which says it before the load is reported.
    reports(Word({"a": ("d", frozenset({3, 4, 0}))}, ()))
    assert request.num_computed_tokens == 32, "the scheduler is to find it yet"
    assert [block.references for block in blocks] == [1, 2, 2, 1]
    both = Word({"b": ("d", frozenset({3, 4}))}, ()), Word({"c": ("d", frozenset({4}))}, {"a"})
    reports(*both, ended={"d", "another"})
    assert request.num_computed_tokens == left
    assert [block.references for block in blocks] == [1, 2, 3, 1]
    reports()
    reports(Word({}, {"b"}), Word({}, {"c"}))
    assert [block.references for block in blocks] == [1, 1, 1, 1]
    assert not aside


def test_a_load_that_ends_well_goes_on_as_it_is() -> None:
    keeper = Keeper(PatchContext("mooncake-failed-loads", {}, {}, lambda: None))
    request = SimpleNamespace(
        request_id="d", num_computed_tokens=32, status=SimpleNamespace(name="WAITING_FOR_REMOTE_KVS")
    )
    keeper.update_state_after_alloc(lambda *args: None, None, request, SimpleNamespace(blocks=([],)), 64)
    output = SimpleNamespace(kv_connector_worker_meta=None, finished_recving={"d"})
    keeper.update_connector_output(lambda output: None, None, output)
    assert request.num_computed_tokens == 32


def test_who_loads_nothing_by_this_connector_is_not_followed() -> None:
    """As another connector's of a MultiConnector: nobody would say when it has ended."""
    keeper = Keeper(PatchContext("mooncake-failed-loads", {}, {}, lambda: None))
    request = SimpleNamespace(request_id="d")
    keeper.update_state_after_alloc(lambda *args: None, None, request, SimpleNamespace(blocks=([],)), 0)
    assert not keeper._loads


def test_what_workers_report_is_of_builtin_types() -> None:
    """A scheduler's process without the bundle has to read it."""
    packed = Word({"a": ("d", frozenset({3}))}, {"b"}).packed()
    assert packed == {("livepatch-held", "a", "d", (3,)): 1, ("livepatch-over", "b"): 1}
    word = unpacked(SimpleNamespace(completed_store_events=packed))
    assert (word.held, word.over) == ({"a": ("d", frozenset({3}))}, {"b"})


@pytest.mark.parametrize("other", [None, object(), SimpleNamespace(completed_store_events={1: 1, ("else", 1): 1})])
def test_what_others_say_is_left_alone(other: Any) -> None:
    word = unpacked(other)
    assert not word.held
    assert not word.over
