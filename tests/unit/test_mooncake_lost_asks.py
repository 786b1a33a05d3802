"""`mooncake-lost-asks`: what is answered, by whom, and what is remembered.

The worker and its answers are stand-ins: what of a release is concerned is in tests/releases/test_mooncake_asks.py.
"""

from __future__ import annotations

import asyncio
import sys
import time
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.mooncake_lost_asks import bootstrap
from vllm_livepatch.patches.mooncake_lost_asks import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext

from tests.unit.support import awaited


class MooncakeXferResponseStatus(IntEnum):
    FINISH, CONTINUE, ERROR = range(3)


class MooncakeXferResponse(SimpleNamespace):
    """As the release's, of which the patch makes its own answers."""


envs = SimpleNamespace(VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=0.08)
"""As the release's module has it, in seconds."""

FINISH, CONTINUE = MooncakeXferResponseStatus.FINISH, MooncakeXferResponseStatus.CONTINUE


class Prefill:
    """A prefill engine's worker, and what it answers."""

    def __init__(self) -> None:
        self.context = PatchContext("mooncake-lost-asks", {}, {}, lambda: None)
        self.wrap = patch.wrappers(self.context)
        self.reqs_need_send: dict[str, Any] = {}
        self.tp_size = 1
        self.need, self.written = 1, asyncio.Event()  # how often a transfer is asked for; whether writes end
        self.written.set()
        self.writing: list[str] = []  # requests of asks whose blocks were begun to be written
        self.freed: list[str] = []  # transfers whose blocks prefill was told to give away
        self._encoder = SimpleNamespace(encode=lambda response: response)
        self._xfer_resp_decoder = SimpleNamespace(decode=lambda response: response)
        self.answers: list[Any] = []

    async def send_multipart(self, parts: Any) -> None:
        identity, response = parts
        assert identity == b"d"
        self.answers.append(
            (response.status.name, response.ok_reqs if hasattr(response, "ok_reqs") else None, response.err_reqs)
        )

    async def ask(self, release: Any, **asked: Any) -> None:
        """Serve an ask to its end."""
        await self.begin(release, **asked)
        while tasks := getattr(self, patch.STATE).tasks:
            await asyncio.gather(*tasks)

    async def begin(self, release: Any, of: int = 1, **asked: Any) -> None:
        """An ask comes, of a decode engine of so many workers."""
        meta = SimpleNamespace(req_blocks=asked, remote_tp_size=of)
        await self.wrap[f"{patch.WORKER}.send_kv_to_decode"](release, self, b"d", self, meta)
        await turns()

    async def serves(self, identity: bytes, socket: Any, meta: Any) -> None:
        """As the release: wait for the prefill's end, write, count, free."""
        found = {name: self.reqs_need_send.setdefault(of[0], entry()) for name, of in meta.req_blocks.items()}
        sent = []
        for name, (transfer, blocks) in meta.req_blocks.items():
            await found[name].ready.wait()
            if transfer not in self.reqs_need_send:
                continue
            await asyncio.sleep(0)
            if blocks:
                self.writing.append(name)
                await self.written.wait()
            found[name].sent += 1
            if found[name].sent == self.need and self.reqs_need_send.pop(transfer, None):
                self.freed.append(transfer)
            sent.append(name)
        await socket.send_multipart((identity, says(FINISH, ok=sent or None)))

    async def leg(self, transfer: str, ended: bool = True) -> None:
        """A prefill begins; where it has ended, its blocks are kept for a transfer."""
        await self.note(set(), begun=(transfer,))
        self.reqs_need_send.setdefault(transfer, entry()).p_req_id = f"p-{transfer}"
        if ended:
            await self.note(set(), ended=(transfer,))
        await turns()

    async def note(self, given_up: set[str], begun: tuple[str, ...] = (), ended: tuple[str, ...] = ()) -> None:
        async def release(metadata: Any) -> None:
            for transfer, blocks in metadata.reqs_to_send.values():
                if blocks:
                    self.reqs_need_send[transfer].ready.set()
            for transfer in metadata.reqs_not_processed:
                self.reqs_need_send.pop(transfer)

        to_send: dict[str, tuple[str, list[int]]] = {f"p-{transfer}": (transfer, []) for transfer in begun}
        to_send |= {f"p-{transfer}": (transfer, [1]) for transfer in ended}
        metadata = SimpleNamespace(reqs_to_send=to_send, reqs_not_processed=given_up)
        await self.wrap[f"{patch.WORKER}.record_send_reqs"](release, self, metadata)


def says(status: MooncakeXferResponseStatus, ok: list[str] | None = None, err: list[str] | None = None) -> Any:
    return MooncakeXferResponse(status=status, ok_reqs=ok, err_reqs=err, err_msg=None)


def entry() -> Any:
    return SimpleNamespace(p_req_id="", ready=asyncio.Event(), sent=0)


def test_an_error_of_the_release_is_answered() -> None:
    async def fails(identity: bytes, socket: Any, meta: Any) -> None:
        raise NotImplementedError("Heterogeneous TP is not supported yet.")

    async def play() -> None:
        prefill = Prefill()
        await prefill.ask(fails, a=("t", [1]))
        assert [status for status, _, _ in prefill.answers] == ["ERROR"]

    asyncio.run(play())


def test_what_an_answer_leaves_out_is_an_error_only_once_it_is_kept_no_more() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        prefill.reqs_need_send = {"tb": entry()}  # ta has been sent, tc was given up
        await socket.send_multipart((identity, says(CONTINUE, ok=["a"])))
        prefill.reqs_need_send = {}
        await socket.send_multipart((identity, says(FINISH)))

    prefill = Prefill()
    asyncio.run(prefill.ask(serves, a=("ta", [1]), b=("tb", [2]), c=("tc", [3])))
    assert prefill.answers == [("CONTINUE", ["a"], ["c"]), ("FINISH", None, ["b"])]


def test_who_asks_after_it_was_given_up_is_answered_so_beside_others_that_are_served() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        assert set(meta.req_blocks) == {"a"}
        await socket.send_multipart((identity, says(FINISH, ok=["a"])))

    async def play() -> None:
        prefill = Prefill()
        await prefill.note({"tb"})
        await prefill.ask(serves, a=("ta", [1]), b=("tb", [2]))
        assert prefill.answers == [("CONTINUE", None, ["b"]), ("FINISH", ["a"], None)]

    asyncio.run(play())


def test_a_bounded_number_is_remembered_and_what_begins_again_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "REMEMBERED", 2)

    async def play() -> None:
        prefill = Prefill()
        for transfer in ("t1", "t2", "t1", "t3"):
            await prefill.note({transfer})
        assert list(getattr(prefill, patch.STATE).given_up) == [hash("t1"), hash("t3")]
        await prefill.note(set(), begun=("t1",))
        assert list(getattr(prefill, patch.STATE).given_up) == [hash("t3")]

    asyncio.run(play())


def test_what_one_ask_waits_for_is_kept_when_another_for_it_has_ended() -> None:
    """As after the time-out of the first; prefill's leg comes later."""

    async def waits(identity: bytes, socket: Any, meta: Any) -> None:
        made = prefill.reqs_need_send.setdefault("t", entry())
        if "first" not in meta.req_blocks:
            await made.ready.wait()

    async def play() -> None:
        second = asyncio.ensure_future(prefill.ask(waits, second=("t", [1])))
        await awaited(lambda: "t" in prefill.reqs_need_send)
        made = prefill.reqs_need_send["t"]
        served = prefill.wrap[f"{patch.WORKER}.send_kv_to_decode"]
        before = set(getattr(prefill, patch.STATE).tasks)
        meta = SimpleNamespace(req_blocks={"first": ("t", [2])}, remote_tp_size=1)
        await served(waits, prefill, b"d", prefill, meta)
        await asyncio.gather(*getattr(prefill, patch.STATE).tasks - before)
        assert prefill.reqs_need_send == {"t": made}
        made.ready.set()
        await second

    prefill = Prefill()
    asyncio.run(play())


async def turns() -> None:
    """What can go on goes on."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_who_asks_for_what_is_kept_again_is_served() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        await socket.send_multipart((identity, says(FINISH, ok=["a"])))

    async def play() -> None:
        prefill = Prefill()
        await prefill.note({"t"})
        prefill.reqs_need_send["t"] = entry()
        await prefill.ask(serves, a=("t", [1]))
        assert prefill.answers == [("FINISH", ["a"], None)]

    asyncio.run(play())


def test_what_is_ready_is_kept_though_nobody_waits_for_it() -> None:
    """It holds a prefill's blocks, which the release frees when they have been fetched or their time is over."""

    async def fails(identity: bytes, socket: Any, meta: Any) -> None:
        raise ConnectionError

    async def play() -> None:
        prefill = Prefill()
        made = prefill.reqs_need_send["t"] = entry()
        made.ready.set()
        await prefill.ask(fails, a=("t", [1]))
        assert prefill.reqs_need_send == {"t": made}

    asyncio.run(play())


def test_who_waits_for_a_prefill_that_is_given_up_waits_no_more() -> None:
    async def waits(identity: bytes, socket: Any, meta: Any) -> None:
        await prefill.reqs_need_send["t"].ready.wait()
        await socket.send_multipart((identity, says(FINISH)))

    async def play() -> None:
        prefill.reqs_need_send["t"] = entry()
        asks = asyncio.ensure_future(prefill.ask(waits, a=("t", [1])))
        await turns()
        assert not prefill.answers
        await prefill.note({"t"})
        await turns()
        assert prefill.answers == [("FINISH", None, ["a"])]
        await asks

    prefill = Prefill()
    asyncio.run(play())


def test_whose_blocks_a_transfer_has_is_not_reported_anew() -> None:
    async def play() -> None:
        prefill = Prefill()
        prefill.reqs_need_send["t"] = entry()
        prefill.reqs_need_send["t"].p_req_id = "first"
        await prefill.note(set(), begun=("t",))
        assert prefill.reqs_need_send["t"].p_req_id == "first"

    asyncio.run(play())


def test_the_release_is_given_what_it_knows_alone() -> None:
    """It stops at the first that it does not know, and forgets those behind it."""
    reported: list[set[str]] = []

    async def release(metadata: Any) -> None:
        reported.append(metadata.reqs_not_processed)

    async def play() -> None:
        prefill = Prefill()
        prefill.reqs_need_send["kept"] = entry()
        to_send: dict[str, tuple[str, list[int]]] = {"p": ("begun", [])}
        metadata = SimpleNamespace(reqs_to_send=to_send, reqs_not_processed={"kept", "begun", "unknown"})
        await prefill.wrap[f"{patch.WORKER}.record_send_reqs"](release, prefill, metadata)
        assert reported == [{"kept", "begun"}]

    asyncio.run(play())


@pytest.mark.parametrize(
    ("name", "blocks", "goes_on"), [("p", [], False), ("p", [1], True), ("another", [], True), ("another", [1], True)]
)
def test_a_prefill_that_came_after_the_one_that_was_given_up_goes_on(
    name: str, blocks: list[int], goes_on: bool
) -> None:
    reported: list[set[str]] = []

    async def release(metadata: Any) -> None:
        reported.append(metadata.reqs_not_processed)

    async def play() -> None:
        prefill = Prefill()
        prefill.reqs_need_send["t"] = entry()
        prefill.reqs_need_send["t"].p_req_id = "p"
        metadata = SimpleNamespace(reqs_to_send={name: ("t", blocks)}, reqs_not_processed={"t"})
        await prefill.wrap[f"{patch.WORKER}.record_send_reqs"](release, prefill, metadata)
        assert reported == [set() if goes_on else {"t"}]
        assert prefill.reqs_need_send["t"].ready.is_set() is not goes_on, "who waits for it hears that it will not come"
        assert (hash("t") in getattr(prefill, patch.STATE).given_up) is not goes_on

    asyncio.run(play())


# The bootstrap server


def known(engines: Any, ranks: Any, stages: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, PatchContext]:
    async def release() -> Any:
        return engines

    groups = SimpleNamespace(
        _TP=ranks and SimpleNamespace(world_size=ranks), _PP=stages and SimpleNamespace(world_size=stages)
    )
    monkeypatch.setitem(sys.modules, bootstrap.GROUPS, groups)
    context = PatchContext("mooncake-lost-asks", {}, {}, lambda: None)
    query = patch.wrappers(context)[f"{patch.SERVER}.query"]
    return asyncio.run(query(release, "the server")), context


def engine(*workers: tuple[int, int]) -> Any:
    of: dict[int, dict[int, str]] = {}
    for rank, stage in workers:
        of.setdefault(rank, {})[stage] = "tcp://somewhere"
    return SimpleNamespace(worker_addr=of)


@pytest.mark.parametrize(
    ("workers", "whole"),
    [
        ([(0, 0)], False),
        ([(1, 0), (1, 1)], False),
        ([(0, 0), (0, 1), (1, 1)], False),
        ([(0, 0), (0, 1), (1, 1), (1, 0)], True),
    ],
)
def test_an_engine_is_named_when_all_of_its_workers_are_known(
    workers: list[tuple[int, int]], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = {0: engine((0, 0), (0, 1), (1, 0), (1, 1)), 1: engine(*workers)}
    found, context = known(engines, 2, 2, monkeypatch)
    assert set(found) == ({0, 1} if whole else {0})
    assert context.counters == ({} if whole else {"not_whole": 1})


@pytest.mark.parametrize("sizes", [(None, None), (2, None), (None, 2)])
def test_a_bootstrap_server_that_stands_alone_names_all_that_it_knows(
    sizes: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or in a process whose groups are not all made."""
    engines = {0: engine((0, 0))}
    found, context = known(engines, *sizes, monkeypatch)
    assert found == engines
    assert not context.aside


def test_where_nobody_knows_which_are_whole_the_release_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {0: "of another kind"}
    found, context = known(engines, 1, 1, monkeypatch)
    assert found is engines
    assert context.aside


def test_who_asks_for_nothing_is_answered_without_an_error() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        await socket.send_multipart((identity, says(FINISH, ok=["a"])))

    async def play() -> None:
        prefill = Prefill()
        await prefill.ask(serves, a=("ta", [1]), b=("tb", []))
        await prefill.note({"tc"})
        await prefill.ask(None, c=("tc", []))
        assert prefill.answers == [("FINISH", ["a"], None), ("FINISH", None, None)]

    asyncio.run(play())


def test_an_error_that_the_release_answers_with_is_its_own() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        await socket.send_multipart((identity, says(MooncakeXferResponseStatus.ERROR)))

    async def play() -> None:
        prefill = Prefill()
        await prefill.ask(serves, a=("t", [1]))
        assert prefill.answers == [("ERROR", None, None)]

    asyncio.run(play())


def test_what_the_release_says_of_an_error_stays_beside_what_it_leaves_out() -> None:
    answer = says(FINISH, ok=["a"], err=["b"])
    answer.err_msg = "of b, the release's own"

    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        await socket.send_multipart((identity, answer))

    prefill = Prefill()
    asyncio.run(prefill.ask(serves, a=("ta", [1]), b=("tb", [2]), c=("tc", [3])))
    assert prefill.answers == [("FINISH", ["a"], ["b", "c"])]
    assert answer.err_msg == "of b, the release's own"


def test_an_answer_that_cannot_be_completed_is_the_releases_own() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        await socket.send_multipart((identity, says(FINISH)))

    prefill = Prefill()
    prefill._xfer_resp_decoder.decode = lambda response: 1 / 0
    asyncio.run(prefill.ask(serves, a=("t", [1])))
    assert prefill.answers == [("FINISH", None, None)]
    assert prefill.context.aside


def test_prefills_that_cannot_be_noted_are_the_releases_to_record() -> None:
    reported: list[Any] = []

    async def release(metadata: Any) -> None:
        reported.append(metadata)

    prefill = Prefill()
    metadata = SimpleNamespace(reqs_to_send={}, reqs_not_processed=None)
    asyncio.run(prefill.wrap[f"{patch.WORKER}.record_send_reqs"](release, prefill, metadata))
    assert reported == [metadata]
    assert prefill.context.aside


def test_of_an_ask_that_has_ended_nothing_is_kept() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        await socket.send_multipart((identity, says(FINISH, ok=["a"])))

    async def play() -> None:
        await prefill.ask(serves, a=("t", [1]))
        await turns()

    prefill = Prefill()
    asyncio.run(play())
    asks = getattr(prefill, patch.STATE)
    assert (asks.tasks, dict(asks.waiting)) == (set(), {})


# Decode lets go

LETS_GO: list[int] = []
ANSWERED = ("FINISH", None, None)


def refused(name: str) -> Any:
    return "FINISH", None, [name]


def test_who_asks_for_what_was_let_go_is_answered_so_soon_and_the_blocks_are_freed() -> None:
    async def play() -> None:
        prefill = Prefill()
        await prefill.leg("t")
        await prefill.ask(prefill.serves, over=("t", LETS_GO))
        assert (prefill.freed, prefill.answers) == (["t"], [ANSWERED])
        await prefill.ask(prefill.serves, late=("t", [1]))
        assert prefill.answers[1:] == [refused("late")]
        assert (prefill.writing, prefill.reqs_need_send) == ([], {})
        assert prefill.context.counters == {"let_go": 1, "refused": 1}

    asyncio.run(play())


def test_who_waits_for_a_prefill_that_has_not_begun_is_answered_when_another_lets_go() -> None:
    async def play() -> None:
        prefill = Prefill()
        await prefill.begin(prefill.serves, waits=("t", [1]))
        await prefill.ask(prefill.serves, over=("t", LETS_GO))
        assert prefill.answers == [ANSWERED, refused("waits")]
        await prefill.leg("t")
        assert (prefill.freed, prefill.writing) == (["t"], [])

    asyncio.run(play())


def test_who_waits_for_a_prefill_that_has_begun_is_served_and_the_blocks_are_freed_once() -> None:
    async def play() -> None:
        prefill = Prefill()
        await prefill.leg("t", ended=False)
        await prefill.begin(prefill.serves, waits=("t", [1]))
        await prefill.begin(prefill.serves, over=("t", LETS_GO))
        assert prefill.answers == [ANSWERED]
        await prefill.leg("t")
        assert prefill.answers[1:] == [("FINISH", ["waits"], None)]
        assert (prefill.freed, prefill.writing) == (["t"], ["waits"])

    asyncio.run(play())


@pytest.mark.parametrize("begins", [False, True])
def test_blocks_that_are_being_read_are_freed_when_that_has_ended(begins: bool) -> None:
    """Whether it is the first ask to be counted, or another decode worker's was."""

    async def play() -> None:
        prefill = Prefill()
        prefill.need = 1 + begins
        await prefill.leg("t")
        prefill.written.clear()
        await prefill.begin(prefill.serves, of=prefill.need, slow=("t", [1]))
        assert prefill.writing == ["slow"]
        for _ in range(prefill.need):
            await prefill.begin(prefill.serves, of=prefill.need, over=("t", LETS_GO))
        assert (prefill.freed, prefill.answers) == ([], [ANSWERED] * prefill.need)
        prefill.written.set()
        await turns()
        await turns()
        assert prefill.freed == ["t"]
        assert not getattr(prefill, patch.STATE).counting

    asyncio.run(play())


def test_each_of_several_decode_workers_lets_go() -> None:
    async def play() -> None:
        prefill = Prefill()
        prefill.need = 2
        await prefill.leg("t")
        await prefill.ask(prefill.serves, of=2, first=("t", LETS_GO))
        assert prefill.freed == []
        await prefill.ask(prefill.serves, of=2, second=("t", LETS_GO))
        assert prefill.freed == ["t"]

    asyncio.run(play())


@pytest.mark.parametrize("several", [{"tp_size": 2}, {"pp_size": 2}])
def test_who_has_other_workers_to_load_from_waits_as_it_would(several: dict[str, int]) -> None:
    """0.30.0 to 0.32.0 give blocks away with the first worker that refuses, while another may write into them."""

    async def play() -> None:
        prefill = Prefill()
        vars(prefill).update(several)
        await prefill.begin(prefill.serves, first=("t", [1]))
        await prefill.begin(prefill.serves, over=("t", LETS_GO))
        await prefill.begin(prefill.serves, late=("t", [2]))
        assert prefill.answers == [ANSWERED]
        await prefill.leg("t")
        assert prefill.writing[0] == "first"
        assert len(prefill.answers) == 3
        assert prefill.freed == ["t"]

    asyncio.run(play())


def test_who_has_other_workers_to_load_from_is_served_by_a_prefill_that_has_not_ended() -> None:
    async def play() -> None:
        prefill = Prefill()
        prefill.tp_size = 2
        await prefill.leg("t", ended=False)
        await prefill.begin(prefill.serves, over=("t", LETS_GO))
        await prefill.begin(prefill.serves, late=("t", [1]))
        await prefill.leg("t")
        await turns()
        assert (prefill.writing, prefill.freed) == (["late"], ["t"])

    asyncio.run(play())


def test_nobody_begins_to_read_blocks_while_they_are_freed() -> None:
    class Slow(Prefill):
        async def serves(self, identity: bytes, socket: Any, meta: Any) -> None:
            empty = not any(blocks for _, blocks in meta.req_blocks.values())
            if empty:
                await self.written.wait()
            assert empty or not self.counts
            await super().serves(identity, socket, meta)

        @property
        def counts(self) -> bool:
            return bool(getattr(self, patch.STATE).counting)

    async def play() -> None:
        prefill = Slow()
        prefill.tp_size = 2
        await prefill.leg("t")
        prefill.written.clear()
        await prefill.begin(prefill.serves, over=("t", LETS_GO))
        assert prefill.counts
        await prefill.begin(prefill.serves, next=("t", [1]))
        prefill.written.set()
        await turns()
        assert (prefill.freed, prefill.writing) == (["t"], [])
        await prefill.leg("t")
        await turns()
        assert prefill.writing == ["next"]
        assert [status for status, _, _ in prefill.answers] == ["FINISH", "FINISH"]

    asyncio.run(play())


def test_who_lets_go_while_another_is_counted_is_counted_after_it() -> None:
    class Slow(Prefill):
        async def serves(self, identity: bytes, socket: Any, meta: Any) -> None:
            self.writing.append("counted")
            await self.written.wait()
            await super().serves(identity, socket, meta)

    async def play() -> None:
        prefill = Slow()
        prefill.need = 2
        prefill.written.clear()
        await prefill.leg("t")
        for name in ("first", "second"):
            await prefill.begin(prefill.serves, of=2, **{name: ("t", LETS_GO)})
        assert prefill.writing == ["counted"]
        prefill.written.set()
        await asyncio.gather(*getattr(prefill, patch.STATE).tasks)
        assert prefill.freed == ["t"]

    asyncio.run(play())


def test_each_transfer_of_an_ask_that_lets_go_is_let_go_by_itself() -> None:
    async def play() -> None:
        prefill = Prefill()
        await prefill.leg("t1")
        await prefill.ask(prefill.serves, one=("t1", LETS_GO), two=("t2", LETS_GO))
        assert (prefill.freed, prefill.answers) == (["t1"], [ANSWERED])
        assert set(prefill.reqs_need_send) == set()
        await prefill.leg("t2")
        assert prefill.freed == ["t1", "t2"]

    asyncio.run(play())


def test_a_decode_engine_that_can_tell_is_answered_that_it_has_let_go() -> None:
    """From 0.32.0. Before, one takes that for the end of a load."""

    async def play() -> None:
        prefill = Prefill()
        prefill.context.facts = {"empty_is_no_load": True}
        await prefill.ask(prefill.serves, over=("t", LETS_GO))
        await prefill.leg("t1")
        await prefill.ask(prefill.serves, other=("t2", LETS_GO), served=("t1", [1]))
        served = ("FINISH", ["served"], None)
        assert prefill.answers == [("FINISH", ["over"], None), ("CONTINUE", ["other"], None), served]

    asyncio.run(play())


def test_an_id_that_is_used_again_after_it_was_let_go_is_another() -> None:
    async def play() -> None:
        prefill = Prefill()
        await prefill.leg("t")
        await prefill.ask(prefill.serves, over=("t", LETS_GO))
        await prefill.leg("t")
        await prefill.ask(prefill.serves, again=("t", [1]))
        assert prefill.answers[1:] == [("FINISH", ["again"], None)]
        assert prefill.freed == ["t", "t"]

    asyncio.run(play())


def test_who_asks_again_before_its_prefill_for_what_was_let_go_and_has_ended_is_served() -> None:
    """A client hung up, and tries again by the same id. Of the two legs decode's is there first."""

    async def play() -> None:
        prefill = Prefill()
        await prefill.leg("t")
        await prefill.ask(prefill.serves, over=("t", LETS_GO))
        await prefill.begin(prefill.serves, again=("t", [1]))
        await prefill.leg("t", ended=False)
        await asyncio.sleep(2 * envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT / patch.LATE_SHARE)
        await prefill.leg("t")
        await asyncio.gather(*getattr(prefill, patch.STATE).tasks)
        assert prefill.answers == [ANSWERED, ("FINISH", ["again"], None)]
        assert prefill.freed == ["t", "t"]

    asyncio.run(play())


def test_a_prefill_that_was_let_go_and_given_up_may_come_again() -> None:
    """The client hung up before either leg was admitted, and tries again by the same id."""

    async def play() -> None:
        prefill = Prefill()
        await prefill.ask(prefill.serves, over=("t", LETS_GO))
        await prefill.note({"t"})
        await prefill.ask(prefill.serves, late=("t", [1]))
        await prefill.leg("t")
        await prefill.ask(prefill.serves, again=("t", [1]))
        assert prefill.answers == [ANSWERED, refused("late"), ("FINISH", ["again"], None)]
        assert prefill.freed == ["t"]

    asyncio.run(play())


def test_a_prefill_that_was_given_up_and_let_go_may_come_again() -> None:
    async def play() -> None:
        prefill = Prefill()
        await prefill.note({"t"})
        await prefill.ask(prefill.serves, over=("t", LETS_GO))
        await prefill.leg("t")
        await prefill.ask(prefill.serves, again=("t", [1]))
        assert prefill.answers == [ANSWERED, ("FINISH", ["again"], None)]

    asyncio.run(play())


def test_what_was_let_go_is_remembered_in_a_bounded_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "REMEMBERED_LET_GO", 2)
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    async def play() -> None:
        nonlocal now
        prefill = Prefill()
        for transfer in ("t1", "t2", "t1", "t3"):
            await prefill.ask(prefill.serves, over=(transfer, LETS_GO))
            now += 1
        asks = getattr(prefill, patch.STATE)
        assert list(asks.let_go) == ["t1", "t3"]
        now = 2 + patch.LET_GO_SECONDS
        assert asks.was_let_go("t1")
        now += 0.5
        assert not asks.was_let_go("t1")
        assert asks.was_let_go("t3")
        assert list(asks.let_go) == ["t3"]

    asyncio.run(play())


def test_an_ask_that_lets_go_beside_others_leaves_those_to_the_release() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        assert set(meta.req_blocks) == {"a"}
        await socket.send_multipart((identity, says(FINISH, ok=["a"])))

    async def play() -> None:
        prefill = Prefill()
        await prefill.ask(serves, a=("ta", [1]), b=("tb", LETS_GO))
        assert prefill.answers == [("FINISH", ["a"], None)]
        assert getattr(prefill, patch.STATE).was_let_go("tb")

    asyncio.run(play())


def test_who_names_a_layout_that_the_worker_lacks_is_asked_for_it() -> None:
    """From 0.33.0. The ask comes again, with the layout."""

    async def misses(identity: bytes, socket: Any, meta: Any) -> None:
        await socket.send_multipart((identity, says(MooncakeXferResponseStatus.ERROR)))

    async def play() -> None:
        prefill = Prefill()
        known = {"layout": None}
        vars(prefill)["_lookup_peer_layout"] = lambda meta: known["layout"]
        wrapped = prefill.wrap[f"{patch.WORKER}.send_kv_to_decode"]

        async def ask(bases: list[int]) -> None:
            meta = SimpleNamespace(
                req_blocks={"over": ("t", LETS_GO)}, remote_tp_size=1, layout_id=7, kv_caches_base_addr=bases
            )
            await wrapped(misses, prefill, b"d", prefill, meta)
            await turns()

        await ask([])
        assert prefill.answers == [("ERROR", None, None)]
        assert not getattr(prefill, patch.STATE).was_let_go("t")
        await ask([1])
        vars(prefill)["_lookup_peer_layout"] = lambda meta: "regions"
        await ask([])
        assert prefill.answers[1:] == [ANSWERED, ANSWERED]

    asyncio.run(play())


def test_an_error_while_who_let_go_is_counted_is_logged_and_others_are_served() -> None:
    async def play() -> None:
        prefill = Prefill()

        async def fails(identity: bytes, socket: Any, meta: Any) -> None:
            raise NotImplementedError

        logged: list[str] = []
        prefill.context.say = lambda kind, message: logged.append(kind)  # type: ignore[method-assign]
        await prefill.leg("t")
        await prefill.ask(fails, over=("t", LETS_GO))
        assert (prefill.answers, logged) == ([ANSWERED], ["error"])
        assert not getattr(prefill, patch.STATE).counting
        await prefill.ask(prefill.serves, over=("t", LETS_GO))
        assert prefill.freed == ["t"]

    asyncio.run(play())


# The listener


class Socket:
    def __init__(self, *messages: list[bytes]) -> None:
        self.messages = list(messages)

    async def recv_multipart(self) -> list[bytes]:
        return self.messages.pop(0)


class Listening:
    """A worker whose listener takes what comes, as a release's, to the end."""

    def __init__(self) -> None:
        self.socket = Socket([b"a", b"", b"stray"], [b"only one"], [b"b", b"an ask"])
        self.async_zmq_ctx: Any = SimpleNamespace(socket=lambda kind: self.socket, term="its own")
        self.own = self.async_zmq_ctx
        self.taken: list[list[bytes]] = []

    async def listen(self, ready: str) -> None:
        assert ready == "ready"
        assert self.async_zmq_ctx.term == "its own"
        made = self.async_zmq_ctx.socket("ROUTER")
        assert self.async_zmq_ctx is self.own
        self.taken.append(await made.recv_multipart())
        raise ConnectionError("the listener's own")

    def run(self, context: PatchContext) -> None:
        listen = patch.wrappers(context)[f"{patch.WORKER}._mooncake_sender_listener"]
        with pytest.raises(ConnectionError):
            asyncio.run(listen(self.listen, self, "ready"))


def test_a_message_that_is_no_ask_is_left() -> None:
    context = PatchContext("mooncake-lost-asks", {}, {}, lambda: None)
    worker = Listening()
    worker.run(context)
    assert worker.taken == [[b"b", b"an ask"]]
    assert worker.async_zmq_ctx is worker.own
    assert context.counters == {"no_ask": 2}


def test_a_listener_that_fails_leaves_what_another_patch_has_put_in_the_contexts_place() -> None:
    """`mooncake-failed-loads`, of an engine that decodes, too: it would not know any more what was sent."""

    class Both(Listening):
        async def listen(self, ready: str) -> None:
            self.async_zmq_ctx.socket("ROUTER")
            self.async_zmq_ctx = "another's"
            raise ConnectionError("the listener's own")

    worker = Both()
    worker.run(PatchContext("mooncake-lost-asks", {}, {}, lambda: None))
    assert worker.async_zmq_ctx == "another's"


def test_a_listener_that_fails_before_it_has_a_socket_leaves_the_context_as_it_was() -> None:
    class Failing(Listening):
        async def listen(self, ready: str) -> None:
            raise ConnectionError("no socket")

    worker = Failing()
    worker.run(PatchContext("mooncake-lost-asks", {}, {}, lambda: None))
    assert worker.async_zmq_ctx is worker.own
