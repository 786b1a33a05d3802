"""What prefill and decode workers say to each other of a push, and what each keeps; NIXL and vLLM have no part in it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.nixl_push_failures import decode, prefill, reach, words
from vllm_livepatch.patches.nixl_push_failures.decode import Desk
from vllm_livepatch.patches.nixl_push_failures.prefill import Answers, Registered
from vllm_livepatch.patches.nixl_push_failures.reach import Reach
from vllm_livepatch.sitecustomize.context import PatchContext

TOKEN = "0123456789abcdef" * 2


def context() -> PatchContext:
    return PatchContext("nixl-push-failures", {"WAIT_SECONDS": 0.0}, {}, lambda: None)


def token(number: int) -> str:
    return f"{number:032x}"


# Words


def test_a_word_arrives_and_nothing_else_is_touched() -> None:
    received = {"p": [b"HB:a,b", words.notification(words.REFUSED, TOKEN), b"r:1"], "q": [b"r:2"]}
    assert words.take(received) == [(words.REFUSED, TOKEN)]
    assert received == {"p": [b"HB:a,b", b"r:1"], "q": [b"r:2"]}


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"refused",
        b"refused/" + b"0" * 31,
        b"refused/" + b"0" * 33,
        b"refused/" + b"\xff" * 32 + b"0",
        b"[" * 5000,
        b"refused/" + b"[" * (1 << 20),
        b"life/" + TOKEN.encode(),
    ],
)
def test_what_cannot_be_read_says_nothing(rest: bytes) -> None:
    received = {"p": [words.SIGN + rest]}
    assert words.take(received) == []
    assert received == {"p": []}


def test_a_word_is_a_heartbeat_for_nobody_to_a_release() -> None:
    """Its worker splits what follows `HB:` at commas, and looks for requests of these names."""
    text = words.notification(words.WITHDRAW, TOKEN).decode("utf-8")
    assert text.startswith("HB:")
    assert text[3:].split(",") == [f"livepatch-push/withdraw/{TOKEN}"]


@pytest.mark.parametrize(
    "given",
    [None, TOKEN, {}, [TOKEN], [TOKEN, b"", 1], [7, b""], [TOKEN[1:], b""], [TOKEN, "address"], [None, b""]],
)
def test_what_decode_adds_is_looked_at(given: Any) -> None:
    assert words.added_to({words.ADDED: given}) is None
    assert words.added_to({words.ADDED: [TOKEN, b"address"]}) == (TOKEN, b"address")


def test_what_0_1_9_adds_says_nothing() -> None:
    """Its decode worker waits for a connection, and holds its blocks as on stock."""
    assert words.added_to({"livepatch_token": TOKEN, "livepatch_host": "127.0.0.1", "livepatch_port": 9}) is None


def test_an_address_of_no_size_is_not_kept() -> None:
    assert words.added_to({words.ADDED: [TOKEN, b"x" * (words.LONGEST_ADDRESS + 1)]}) == (TOKEN, b"")


# Decode


def late(desk: Desk) -> None:
    for waiting in desk._of_request.values():
        waiting.ask_at = 0.0
    desk._look = 0.0


def asked(desk: Desk) -> list[str]:
    desk._look = 0.0
    return [waiting.request_id for waiting in desk.overdue()]


def test_what_prefill_refuses_has_failed_once() -> None:
    desk = Desk(context(), 600)
    first, second = desk.register("a", "p"), desk.register("b", "p")
    assert first != second
    desk.refused(first)
    desk.refused(first)
    assert list(desk.failed()) == ["a"]
    assert list(desk.failed()) == []
    desk.refused(second)
    assert list(desk.failed()) == ["b"]


def test_who_does_not_know_the_token_is_not_believed() -> None:
    livepatch = context()
    desk = Desk(livepatch, 600)
    desk.register("a", "p")
    for stranger in ("a", "", TOKEN):
        desk.refused(stranger)
    assert (list(desk.failed()), livepatch.counters) == ([], {})


def test_what_has_come_is_waited_for_no_more() -> None:
    desk = Desk(context(), 600)
    first = desk.register("a", "p")
    desk.ended("a")
    desk.ended("a")
    desk.refused(first)
    assert list(desk.failed()) == []


def test_an_id_that_is_registered_again_is_another_registration() -> None:
    desk = Desk(context(), 600)
    first = desk.register("a", "p")
    second = desk.register("a", "p")
    desk.refused(first)
    assert list(desk.failed()) == []
    desk.refused(second)
    desk.register("a", "p")  # before the step asked
    assert list(desk.failed()) == []


def test_prefill_is_asked_when_it_is_late_and_not_at_once_again() -> None:
    livepatch = context()
    desk = Desk(livepatch, 600)
    desk.register("a", "p")
    desk.register("b", "p")
    assert asked(desk) == []
    late(desk)
    assert asked(desk) == ["a", "b"]
    assert asked(desk) == []
    assert livepatch.counters == {"withdrawn": 2}
    late(desk)
    assert asked(desk) == ["a", "b"]
    assert livepatch.counters == {"withdrawn": 2, "unanswered": 2}
    desk.ended("a")
    late(desk)
    assert asked(desk) == ["b"]


def test_time_alone_fails_nothing() -> None:
    desk = Desk(context(), 600)
    desk.register("a", "p")
    for _ in range(100):
        late(desk)
        desk.overdue()
    assert list(desk.failed()) == []


def test_an_answer_counts_after_any_number_of_questions() -> None:
    desk = Desk(context(), 600)
    first = desk.register("a", "p")
    late(desk)
    desk.overdue()
    desk.refused(first)
    late(desk)
    assert (asked(desk), list(desk.failed())) == ([], ["a"])


def test_not_all_are_asked_about_at_once() -> None:
    desk = Desk(context(), 600)
    for number in range(decode.ASKS_AT_ONCE + 1):
        desk.register(f"r{number}", "p")
    late(desk)
    assert len(asked(desk)) == decode.ASKS_AT_ONCE
    assert asked(desk) == [f"r{decode.ASKS_AT_ONCE}"]


def test_nobody_is_asked_more_often_than_that() -> None:
    desk = Desk(context(), 0.0)
    desk.register("a", "p")
    assert len(desk.overdue()) == 1
    desk.register("b", "p")
    assert desk.overdue() == []


@pytest.mark.parametrize("name", [b"agent", bytearray(b"agent"), "agent"])
def test_an_agent_s_name_is_text(name: Any) -> None:
    assert decode.agent_name(name) == "agent"


def test_decode_keeps_nothing_of_what_has_ended() -> None:
    """10,000 registrations, of which each ends in another way, leave nothing."""
    desk = Desk(context(), 600)
    for number in range(10_000):
        given = desk.register(f"r{number}", f"p{number % 400}")
        if number % 3 == 0:
            desk.refused(given)
            assert list(desk.failed()) == [f"r{number}"]
        elif number % 3 == 1:
            late(desk)
            desk.overdue()
        desk.ended(f"r{number}")
    kept = (desk._new, desk._asked, desk._of_request, desk._failed)
    assert [len(one) for one in kept] == [0, 0, 0, 0]


# Prefill


class Side:
    """A prefill worker's answers, what it told, and what its release keeps."""

    def __init__(self) -> None:
        self.livepatch = context()
        self.told: list[str] = []
        self.answers = Answers(self.livepatch, lambda registered: self.told.append(registered.token))
        self.pending: dict[str, Any] = {}

    def registration(self, given: str = TOKEN, request_id: str = "a-d") -> dict[str, Any]:
        return {"request_id": request_id, "decode_engine_id": "d", words.ADDED: [given, b"address"]}

    def take(self, registration: dict[str, Any]) -> Registered:
        registered = self.answers.take(registration, lambda request_id: request_id.partition("-")[0])
        assert registered is not None
        self.pending[registration["request_id"]] = registration
        return registered

    def begin(self, registration: dict[str, Any], during: Callable[[], Any] = lambda: None) -> bool:
        """The release takes it out of what waits, and begins."""
        self.pending.pop(registration["request_id"], None)
        if not self.answers.begins("a-p", "a", registration):
            return False
        try:
            during()
        finally:
            self.answers.began("a-p", registration)
        return True

    def posts(self) -> None:
        self.answers.posted = True


def test_decode_without_the_patch_is_sent_nothing() -> None:
    side = Side()
    registration = {"request_id": "a-d", "decode_engine_id": "d"}
    assert side.answers.take(registration, str) is None
    assert side.begin(registration, side.posts)
    assert side.begin(registration)
    side.answers.sweep({})
    assert side.told == []


def test_what_waits_is_withdrawn_and_forgotten() -> None:
    side = Side()
    registered = side.take(side.registration())
    other = side.registration(token(2), "b-d")
    side.take(other)
    side.answers.withdraw(TOKEN, side.pending)
    assert (side.told, list(side.pending)) == ([TOKEN], ["b-d"])
    assert registered.registration is None
    side.answers.withdraw(TOKEN, side.pending)  # the word was lost
    assert side.told == [TOKEN, TOKEN]
    assert side.livepatch.counters == {"rejected": 1}


def test_what_is_not_known_is_not_answered() -> None:
    """It may be on its way, or written, or of another life of this engine."""
    side = Side()
    side.answers.withdraw(TOKEN, side.pending)
    assert side.told == []
    registration = side.registration()
    side.take(registration)
    assert side.begin(registration, side.posts)
    side.answers.withdraw(TOKEN, side.pending)
    side.answers.sweep(side.pending)
    assert side.told == []


def test_what_nixl_was_given_is_never_refused() -> None:
    """Whatever is said of its end: a part of it may be under way."""
    side = Side()
    registration = side.registration()
    registered = side.take(registration)

    def fails() -> None:
        side.posts()
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError):
        side.begin(registration, fails)
    side.answers.refuse(registered, side.pending)
    side.answers.ended([("a", "a-p")])
    side.answers.close(side.pending)
    side.answers.sweep(side.pending)
    assert (side.told, registered.state) == ([], prefill.WRITTEN)


def test_what_came_to_nothing_is_refused() -> None:
    side = Side()
    registration = side.registration()
    side.take(registration)
    with pytest.raises(ZeroDivisionError):
        side.begin(registration, lambda: 1 / 0)
    side.answers.sweep(side.pending)
    assert side.told == [TOKEN]


def test_what_is_about_to_begin_is_not_refused_meanwhile() -> None:
    """The engine's thread ends the worker while the writer begins."""
    side = Side()
    registration = side.registration()
    side.take(registration)

    def during() -> None:
        side.answers.close(side.pending)
        side.answers.withdraw(TOKEN, side.pending)
        side.posts()

    side.begin(registration, during)
    assert side.told == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_handshake_is_waited_for(fails: bool) -> None:
    side = Side()
    registration = side.registration()
    side.take(registration)
    future: Future[None] = Future()

    def shake() -> None:
        side.answers.shaking("another", Future())
        side.answers.shaking("d", future)

    side.begin(registration, shake)
    side.answers.shaking("d", Future())  # for somebody else's sake
    side.answers.sweep(side.pending)
    assert side.told == []
    if fails:
        future.set_exception(RuntimeError("no hands"))
        side.answers.sweep(side.pending)
        assert side.told == [TOKEN]
    else:
        future.set_result(None)
        side.answers.sweep(side.pending)
        assert side.begin(registration, side.posts)
        assert side.told == []


def test_a_handshake_that_is_given_up_writes_nothing() -> None:
    side = Side()
    registration = side.registration()
    side.take(registration)
    future: Future[None] = Future()
    side.begin(registration, lambda: side.answers.shaking("d", future))
    assert future.cancel()
    future.set_running_or_notify_cancel()
    side.answers.sweep(side.pending)
    assert side.told == [TOKEN]


def test_what_is_withdrawn_while_hands_are_shaken_is_not_begun() -> None:
    side = Side()
    registration = side.registration()
    side.take(registration)
    future: Future[None] = Future()
    side.begin(registration, lambda: side.answers.shaking("d", future))
    side.answers.withdraw(TOKEN, side.pending)
    assert side.told == [TOKEN]
    future.set_exception(RuntimeError("too late"))
    side.answers.sweep(side.pending)
    assert side.told == [TOKEN]
    assert not side.begin(registration, side.posts)


@pytest.mark.parametrize("with_patch", [True, False])
def test_a_request_that_ends_while_hands_are_shaken_is_marked(with_patch: bool) -> None:
    """Also where decode has no patch, and also when its id is used again: its blocks are another's."""
    side = Side()
    registration = side.registration()
    if with_patch:
        side.take(registration)
    else:
        del registration[words.ADDED]
    side.begin(registration, lambda: side.answers.shaking("d", Future()))
    side.answers.ended([("a", "a-p")])
    side.answers.begun("a")
    assert registration[prefill.LATE]
    side.answers.sweep(side.pending)
    assert side.told == ([TOKEN] if with_patch else [])


def test_what_waits_for_a_request_that_ends_is_refused_and_what_comes_later_is_not() -> None:
    side = Side()
    first, second = side.registration(token(1), "a-1"), side.registration(token(2), "a-2")
    side.take(first)
    side.answers.ended([("a", "a-p")])
    side.answers.begun("a")
    side.take(second)
    side.answers.sweep(side.pending)
    assert (side.told, list(side.pending)) == ([token(1)], ["a-2"])


def test_a_token_that_comes_twice_has_one_fate() -> None:
    side = Side()
    first, second = side.registration(), side.registration()
    side.take(first)
    side.take(second)
    side.answers.withdraw(TOKEN, side.pending)
    assert not side.begin(second, side.posts)
    assert not side.begin(side.registration() | {prefill.STATE: side.take(side.registration())}, side.posts)
    assert side.told == [TOKEN]


def test_what_stands_in_a_registration_is_not_taken_for_ours() -> None:
    side = Side()
    registration = side.registration() | {prefill.STATE: "written"}
    assert side.take(registration).state == prefill.WAITS


def test_a_worker_that_ends_refuses_what_waits() -> None:
    side = Side()
    waits, begins = side.registration(token(1), "a-1"), side.registration(token(2), "b-2")
    side.take(waits)
    side.take(begins)
    side.answers.close(side.pending)
    assert (side.told, side.pending) == ([token(1), token(2)], {})
    assert not side.begin({"request_id": "c-d", "decode_engine_id": "d"}, side.posts)


def test_a_patch_that_stands_aside_takes_nothing_new() -> None:
    side = Side()
    side.livepatch.withdraw()
    assert side.answers.take(side.registration(), str) is None


def test_prefill_keeps_little_of_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 registrations, each ended in another way; what is remembered has its bounds."""
    monkeypatch.setattr(prefill, "REMEMBERED", 16)
    monkeypatch.setattr(prefill, "OVER", 16)
    side = Side()
    answers = side.answers
    for number in range(10_000):
        registration = side.registration(token(number), f"a{number}-d")
        registered = side.take(registration)
        if number % 4 == 0:
            side.begin(registration, side.posts)
        elif number % 4 == 1:
            answers.withdraw(token(number), side.pending)
        elif number % 4 == 2:
            side.begin(registration)
        answers.ended([(f"a{number}", f"a{number}-p")])
        answers.sweep(side.pending)
        assert registered.registration is None
    kept = (answers._waiting, answers._of_request, answers._left, answers._late, side.pending)
    assert [len(one) for one in kept] == [0, 0, 0, 0, 0]
    assert (len(answers._refused), len(answers._over)) == (16, 16)


# Reach


class Agent:
    """NIXL's, of which only what is asked here is there."""

    def __init__(self) -> None:
        self.known: dict[str, bytes] = {}
        self.sent: list[tuple[Any, bytes]] = []
        self.broken = False

    def add_remote_agent(self, address: bytes) -> str:
        self.known[f"agent of {address!r}"] = address
        return f"agent of {address!r}"

    def remove_remote_agent(self, name: str) -> None:
        del self.known[name]

    def send_notif(self, name: Any, notif_msg: bytes) -> None:
        if self.broken:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self.sent.append((name, notif_msg))


class Lock:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def worker_of(agent: Any) -> Any:
    return SimpleNamespace(nixl_wrapper=agent, _remote_agents={}, _handshake_futures={}, _handshake_lock=Lock())


def registered(engine_id: str = "d", address: bytes = b"address") -> Registered:
    return Registered(TOKEN, address, {"decode_engine_id": engine_id, "request_id": "a"}, "a")


def test_decode_is_told_over_the_agent_that_the_release_knows() -> None:
    worker = worker_of(Agent())
    worker._remote_agents["d"] = {(0, 0): b"decode"}
    Reach(context(), worker).tell(registered())
    agent = worker.nixl_wrapper
    assert (agent.sent, agent.known) == ([(b"decode", words.notification(words.REFUSED, TOKEN))], {})


def test_decode_is_told_by_its_address_before_hands_are_shaken() -> None:
    worker = worker_of(Agent())
    reached = Reach(context(), worker)
    reached.tell(registered())
    assert [name for name, _ in worker.nixl_wrapper.sent] == ["agent of b'address'"]
    reached.forget()
    assert worker.nixl_wrapper.known == {}


@pytest.mark.parametrize("where", ["_remote_agents", "_handshake_futures"])
def test_an_agent_that_the_release_has_met_since_stays(where: str) -> None:
    worker = worker_of(Agent())
    reached = Reach(context(), worker)
    reached.tell(registered())
    getattr(worker, where)["d"] = {}
    reached.forget()
    assert len(worker.nixl_wrapper.known) == 1


def test_few_agents_are_known_by_their_address_alone() -> None:
    worker = worker_of(Agent())
    reached = Reach(context(), worker)
    for number in range(400):
        reached.tell(registered(f"d{number}", b"%d" % number))
    assert len(worker.nixl_wrapper.known) == len(reached._guests) == reach.GUESTS
    worker.nixl_wrapper.known.clear()  # the release has let them go with their engines
    reached.forget()
    assert not reached._guests


def test_an_agent_of_the_releases_stays_under_whatever_engine_its_address_came() -> None:
    """A stranger can register with the address of an agent that it has read at the handshake's port."""
    worker = worker_of(Agent())
    worker._remote_agents["d"] = {(0, 0): worker.nixl_wrapper.add_remote_agent(b"decode")}
    reached = Reach(context(), worker)
    reached.tell(registered("stranger", b"decode"))
    reached.forget()
    assert list(worker.nixl_wrapper.known.values()) == [b"decode"]


@pytest.mark.parametrize("how", ["broken", "no address"])
def test_who_cannot_be_told_holds_its_blocks(how: str) -> None:
    livepatch = context()
    worker = worker_of(Agent())
    worker.nixl_wrapper.broken = how == "broken"
    Reach(livepatch, worker).tell(registered(address=b"" if how == "no address" else b"address"))
    assert (livepatch.counters, livepatch.aside) == ({"untold": 1}, False)


def test_decode_whose_nixl_says_no_address_registers_all_the_same() -> None:
    livepatch = context()
    assert Reach(livepatch, worker_of(Agent())).address() == b""
    assert not livepatch.aside
