"""What prefill and decode workers say to each other of a push, over real connections; NIXL and vLLM have no part in it."""

from __future__ import annotations

import contextlib
import gc
import json
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.nixl_push_failures import decode, prefill, wrappers
from vllm_livepatch.patches.nixl_push_failures.decode import HOST, PORT, TOKEN, Desk
from vllm_livepatch.patches.nixl_push_failures.lines import Line, last_to_close, listen
from vllm_livepatch.patches.nixl_push_failures.prefill import Answers
from vllm_livepatch.sitecustomize.context import PatchContext

LOOPBACK = ("127.0.0.1", 9)


def context(wait: float = 0.0, settle: float = 0.0) -> PatchContext:
    return PatchContext("nixl-push-failures", {"WAIT_SECONDS": wait, "SETTLE_SECONDS": settle}, {}, lambda: None)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.001)


class Prefill:
    """Prefill's end of a connection, by hand."""

    def __init__(self, registration: dict[str, Any]) -> None:
        self.connection = socket.create_connection((registration[HOST], registration[PORT]), 60)
        self.lines = self.connection.makefile("rb")

    def say(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def heard(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.lines.readline())
        return message

    def close(self, reset: bool = False) -> None:
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.lines.close()
        self.connection.close()


def registered(desk: Desk, request_id: str = "r", agent: str = "p") -> dict[str, Any]:
    registration = desk.register(request_id, agent, LOOPBACK)
    assert registration is not None
    return registration


def failed(desk: Desk) -> list[str]:
    desk._look = 0.0
    return list(desk.failed())


# Decode


def test_the_end_of_a_life_line_is_the_end_of_prefill() -> None:
    desk = Desk(context(), 600)
    registration = registered(desk)
    other = registered(desk, "other", "q")
    life = Prefill(registration)
    life.say(life=registration[TOKEN])
    until(lambda: desk.lives)
    assert failed(desk) == []
    life.close()
    until(lambda: failed(desk) == ["r"])
    assert desk.register("later", "p", LOOPBACK) is None  # is not sent
    assert failed(desk) == ["r", "later"]
    desk.ended("r")
    desk.ended("later")
    assert [waiting.request_id for waiting in desk.waiting.values()] == ["other"]
    assert other[TOKEN] in desk.waiting


def test_what_a_process_sent_before_its_end_arrives_meanwhile() -> None:
    desk = Desk(context(settle=600), 600)
    registration = registered(desk)
    life = Prefill(registration)
    life.say(life=registration[TOKEN])
    until(lambda: desk.lives)
    life.close()
    until(lambda: not desk.lives)
    assert failed(desk) == []
    desk.waiting[registration[TOKEN]].failed = time.monotonic()
    assert failed(desk) == ["r"]


def test_prefill_may_call_when_it_has_written() -> None:
    """The KV can be there before the connections are."""
    desk = Desk(context(), 600)
    registration = registered(desk)
    desk.ended("r")
    life, talk = Prefill(registration), Prefill(registration)
    life.say(life=registration[TOKEN])
    talk.say(taken=registration[TOKEN])
    until(lambda: desk.lives and desk._lines)
    registered(desk, "next")
    life.close()
    until(lambda: failed(desk) == ["next"])


def test_a_reset_says_nothing_of_prefill() -> None:
    desk = Desk(context(), 600)
    registration = registered(desk)
    life = Prefill(registration)
    life.say(life=registration[TOKEN])
    until(lambda: desk.lives)
    life.close(reset=True)
    until(lambda: not desk.lives)
    assert failed(desk) == []
    assert desk.register("later", "p", LOOPBACK) is not None


def test_the_end_of_the_other_connection_says_nothing() -> None:
    """Prefill's kernel resets it or ends it, as it was read or not."""
    desk = Desk(context(), 600)
    registration = registered(desk)
    talk, life = Prefill(registration), Prefill(registration)
    life.say(life=registration[TOKEN])
    talk.say(taken=registration[TOKEN])
    until(lambda: desk.lives and desk._lines)
    (line,) = desk._lines.values()
    talk.close()
    until(lambda: not line.alive)
    assert failed(desk) == []


def test_what_had_begun_is_left_alone_for_a_while() -> None:
    desk = Desk(context(settle=600), 600)
    begun, not_begun = registered(desk, "begun"), registered(desk, "not begun")
    talk = Prefill(begun)
    talk.say(refused=begun[TOKEN], posted=True)
    talk.say(refused=not_begun[TOKEN], posted=False)
    until(lambda: failed(desk) == ["not begun"])
    desk.waiting[begun[TOKEN]].failed = time.monotonic()
    assert failed(desk) == ["begun", "not begun"]


def test_what_counts_as_failed_already_is_not_put_off() -> None:
    """Whatever else is said of it: decode would wait once more for what has settled."""
    desk = Desk(context(settle=600), 600)
    registration, other = registered(desk), registered(desk, "other")
    waiting = desk.waiting[registration[TOKEN]]
    waiting.failed = 5.0
    life, talk = Prefill(registration), Prefill(registration)
    talk.say(refused=registration[TOKEN], posted=True)
    talk.say(refused=other[TOKEN], posted=False)
    until(lambda: failed(desk) == ["r", "other"])
    life.say(life=registration[TOKEN])
    until(lambda: desk.lives)
    life.close()
    until(lambda: not desk.lives)
    assert (waiting.failed, failed(desk)) == (5.0, ["r", "other"])


def test_who_does_not_know_the_token_is_not_believed() -> None:
    desk = Desk(context(), 600)
    registration = registered(desk)
    talk = Prefill(registration)
    talk.say(refused="r")
    talk.say(life=7)
    talk.say()
    talk.say(taken=registration[TOKEN])
    until(lambda: desk._lines)
    assert failed(desk) == []
    assert not desk.lives


@pytest.mark.parametrize("rubbish", [b"GET / HTTP/1.1\r\n", b"[]\n", b"x" * (1 << 20)])
def test_strangers_are_shown_out(rubbish: bytes) -> None:
    livepatch = context()
    desk = Desk(livepatch, 600)
    talk = Prefill(registered(desk))
    with contextlib.suppress(OSError):
        talk.connection.sendall(rubbish)
        assert talk.connection.recv(1) == b""
    assert not livepatch.aside
    assert failed(desk) == []


def test_an_error_of_ours_leaves_the_connection_open() -> None:
    """A closed one would say that this process is gone."""
    livepatch = context()

    def fail(*_: Any) -> None:
        raise KeyError("ours")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = Line(fail, lambda line, gone: None, livepatch.stand_aside)
        line.call(("127.0.0.1", listener.getsockname()[1]))
        decode_end, _ = listener.accept()
    with decode_end:
        decode_end.sendall(b"{}\n")
        until(lambda: livepatch.aside)
        del line
        gc.collect()
        decode_end.settimeout(0.1)
        with pytest.raises(TimeoutError):
            decode_end.recv(1)


def test_an_error_of_ours_does_not_say_that_the_other_process_is_gone() -> None:
    """Decode would give blocks to others to which prefill writes still."""
    livepatch = context()
    ends: list[bool] = []

    def fail(*_: Any) -> None:
        raise KeyError("ours")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = Line(fail, lambda line, gone: ends.append(gone), livepatch.stand_aside)
        line.call(("127.0.0.1", listener.getsockname()[1]))
        other, _ = listener.accept()
    with other:
        other.sendall(b"{}\n")
        until(lambda: livepatch.aside)
        assert (ends, line.alive) == ([False], False)


@pytest.fixture
def closed() -> Iterator[tuple[str, int]]:
    """An address at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield "127.0.0.1", bound.getsockname()[1]


def test_who_cannot_be_reached_is_not_taken_for_gone(closed: tuple[str, int]) -> None:
    ends: list[bool] = []
    line = Line(lambda line, message: None, lambda line, gone: ends.append(gone), context().stand_aside)
    line.call(closed)
    until(lambda: ends)
    assert (ends, line.alive) == ([False], False)


def test_an_error_at_the_end_of_a_connection_is_ours(closed: tuple[str, int]) -> None:
    """It is raised in a thread of the line's, in which nobody else hears of it."""
    livepatch = context()

    def fail(line: Line, gone: bool) -> None:
        raise KeyError("ours")

    Line(lambda line, message: None, fail, livepatch.stand_aside)._call(closed)  # what that thread does
    assert livepatch.aside


def test_decode_listens_where_it_reaches_the_first_of_prefill_s_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best comes first; the way to another may be none of prefill's ways to decode."""
    addresses = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (host, 9)) for host in ("127.0.0.1", "192.0.2.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    assert listen(("prefill", 9), lambda connection: None)[0] == "127.0.0.1"


def test_prefill_is_asked_once_it_is_late_and_can_be_reached() -> None:
    livepatch = context()
    desk = Desk(livepatch, 600)
    registration = registered(desk)
    assert failed(desk) == []
    desk.waiting[registration[TOKEN]].ask_at = 0.0
    assert failed(desk) == []
    assert livepatch.counters == {"unanswered": 1}
    talk = Prefill(registration)
    talk.say(taken=registration[TOKEN])
    until(lambda: desk._lines)
    assert failed(desk) == []  # not again at once
    desk.waiting[registration[TOKEN]].ask_at = 0.0
    assert failed(desk) == []
    assert talk.heard() == {"withdraw": registration[TOKEN]}
    assert livepatch.counters == {"unanswered": 1, "withdrawn": 1}


def test_prefill_that_hung_up_cannot_be_asked() -> None:
    livepatch = context()
    desk = Desk(livepatch, 600)
    registration = registered(desk)
    talk = Prefill(registration)
    talk.say(taken=registration[TOKEN])
    until(lambda: desk._lines)
    (line,) = desk._lines.values()
    talk.close()
    until(lambda: not line.alive)
    desk.waiting[registration[TOKEN]].ask_at = 0.0
    assert failed(desk) == []
    assert livepatch.counters == {"unanswered": 1}


def test_what_waits_is_remembered_however_many_come_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "REMEMBERED", 1)
    desk = Desk(context(), 600)
    first = registered(desk, "first")
    registered(desk, "second")
    life = Prefill(first)
    life.say(life=first[TOKEN])
    until(lambda: desk.lives)
    talk = Prefill(first)
    talk.say(refused=first[TOKEN], posted=False)
    until(lambda: failed(desk) == ["first"])


def test_an_id_that_is_registered_again_is_another_registration() -> None:
    desk = Desk(context(), 600)
    first = registered(desk)
    second = registered(desk)
    talk = Prefill(first)
    talk.say(refused=first[TOKEN], posted=False)
    talk.say(taken=second[TOKEN])
    until(lambda: desk._lines)
    assert failed(desk) == []


# Prefill


def test_the_connection_is_closed_after_the_files_that_nixl_has_open() -> None:
    """A process's files are closed in their order."""
    with socket.socket() as low, last_to_close(low) as high:
        assert high.fileno() > 500 > low.fileno()
        assert not high.get_inheritable()


def test_the_connection_s_number_is_one_that_the_kernel_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives none beyond the soft limit, and the connection would keep a low one."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1 << 30))
    with socket.socket() as low, last_to_close(low) as high:
        assert 512 <= high.fileno() < 1024


class Decode:
    """Decode's end of both connections, by hand."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(60)
        self.opened: list[socket.socket] = []
        self.talk: Any = None

    def registration(self, token: str = "t") -> dict[str, Any]:
        return {TOKEN: token, HOST: "127.0.0.1", PORT: self.listener.getsockname()[1], "request_id": "d"}

    def accept_both(self) -> None:
        """Take both connections, whichever comes first."""
        firsts = []
        for _ in range(2):
            self.opened.append(self.listener.accept()[0])
            self.opened[-1].settimeout(60)
            lines = self.opened[-1].makefile("rwb")
            firsts.append(json.loads(lines.readline()))
            if "taken" in firsts[-1]:
                self.talk = lines
        assert sorted(next(iter(first)) for first in firsts) == ["life", "taken"]

    def heard(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.talk.readline())
        return message

    def withdraw(self, token: str) -> None:
        self.talk.write(json.dumps({"withdraw": token}).encode() + b"\n")
        self.talk.flush()

    def close(self) -> None:
        for connection in (self.listener, *self.opened):
            connection.close()


@pytest.fixture
def peer() -> Iterator[Decode]:
    made = Decode()
    yield made
    if made.talk is not None:
        made.talk.close()
    made.close()


def taken(answers: Answers, peer: Decode, token: str = "t") -> prefill.Registered:
    asked = answers.take(peer.registration(token))
    assert asked is not None
    return asked


def test_decode_without_the_bundle_is_sent_nothing() -> None:
    answers = Answers(context())
    assert answers.take({"request_id": "d"}) is None
    assert not answers.unwanted({"request_id": "d"})


def test_what_is_withdrawn_is_not_served(peer: Decode) -> None:
    answers = Answers(context())
    taken(answers, peer)
    peer.accept_both()
    peer.withdraw("t")
    assert peer.heard() == {"refused": "t", "posted": False}
    assert answers.unwanted(peer.registration())
    assert answers.take(peer.registration()) is None
    until(lambda: answers.tidy)  # the writer is to forget it
    peer.withdraw("not come yet")
    assert peer.heard() == {"refused": "not come yet", "posted": False}
    assert answers.take(peer.registration("not come yet")) is None


def test_what_is_under_way_is_not_given_up(peer: Decode) -> None:
    answers = Answers(context())
    asked = taken(answers, peer)
    peer.accept_both()
    with answers.writing(asked):
        answers.made("handle")
        answers.posting("handle")
    peer.withdraw("t")
    until(lambda: asked.withdrawn)
    answers.released("handle")
    assert peer.heard() == {"refused": "t", "posted": True}
    peer.withdraw("t")  # the word was lost
    assert peer.heard() == {"refused": "t", "posted": True}


def test_what_is_about_to_be_written_is_not_given_up(peer: Decode) -> None:
    """Decode withdraws it between the match and the post."""
    answers = Answers(context())
    asked = taken(answers, peer)
    peer.accept_both()
    with answers.writing(asked):
        peer.withdraw("t")
        until(lambda: asked.withdrawn)
        answers.made("handle")
    assert not answers.unwanted(peer.registration())
    answers.state("handle", "DONE")
    answers.released("handle")
    assert not answers.unwanted(peer.registration())


def test_a_handshake_is_waited_for_unless_it_is_withdrawn(peer: Decode) -> None:
    answers = Answers(context())
    waits, withdrawn = taken(answers, peer), taken(answers, peer, "u")
    peer.accept_both()
    assert peer.heard() == {"taken": "u"}
    future: Future[None] = Future()
    with answers.writing(waits):
        answers.shaking(future)
    assert not answers.unwanted(peer.registration())
    with answers.writing(withdrawn):
        answers.shaking(Future())
        peer.withdraw("u")
        until(lambda: withdrawn.withdrawn)
    assert peer.heard() == {"refused": "u", "posted": False}
    future.set_exception(RuntimeError("no hands"))
    assert peer.heard() == {"refused": "t", "posted": False}


def test_a_patch_that_stands_aside_says_nothing(peer: Decode) -> None:
    """It does not see any more what is written."""
    livepatch = context()
    answers = Answers(livepatch)
    asked = taken(answers, peer)
    peer.accept_both()
    livepatch.withdraw()
    peer.withdraw("t")
    peer.withdraw("unknown")
    answers.refuse(asked)
    for connection in peer.opened:
        connection.settimeout(0.1)
    with pytest.raises(TimeoutError):
        peer.heard()
    assert not answers.unwanted(peer.registration())


def test_several_writes_for_one_registration_are_not_reported(peer: Decode) -> None:
    livepatch = context()
    answers = Answers(livepatch)
    with answers.writing(taken(answers, peer)):
        answers.made("first")
        answers.made("second")
    assert livepatch.aside


def test_who_was_refused_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch, peer: Decode) -> None:
    monkeypatch.setattr(prefill, "REMEMBERED", 2)
    answers = Answers(context())
    for token in "abc":
        answers.refuse(taken(answers, peer, token))
    assert [answers.unwanted(peer.registration(token)) for token in "abc"] == [False, True, True]


# The worker


@pytest.mark.parametrize(
    "layout",
    [
        {"decode_tp_size": 2},
        {"remote_tp_size": 4},
        {"remote_pp_size": 2},
        {"agents": {0: b"p", 1: b"q"}},
    ],
)
def test_other_layouts_are_left_as_they_are(layout: dict[str, Any]) -> None:
    """There, several prefill ranks write into one decode rank's blocks, or one into several's."""
    agents = layout.pop("agents", {0: b"p"})
    registration = {"remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 9, "request_id": "d"}
    registration |= {"remote_tp_size": 1, "decode_tp_size": 1, **layout}
    livepatch = context()
    desk = Desk(livepatch, 600)
    worker = SimpleNamespace(_remote_agents={"e": agents}, _livepatch_desk=desk)
    wrapper = wrappers.wrappers(livepatch)[f"{wrappers.WORKER}._do_send_reg_notif"]
    sent: list[Any] = []
    wrapper(lambda *args: sent.append(args), worker, ("d", registration), {})
    assert sent == [("d", registration)]
    assert livepatch.counters == {"not_covered": 1}
    assert not desk.waiting


def test_a_worker_that_cannot_listen_registers_as_on_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no address")

    monkeypatch.setattr(decode, "listen", refuse)
    registration = {"remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 9, "request_id": "d"}
    registration |= {"remote_tp_size": 1, "decode_tp_size": 1}
    livepatch = context()
    worker = SimpleNamespace(_remote_agents={"e": {0: b"p"}}, _livepatch_desk=Desk(livepatch, 600))
    wrapper = wrappers.wrappers(livepatch)[f"{wrappers.WORKER}._do_send_reg_notif"]
    sent: list[Any] = []
    wrapper(lambda *args: sent.append(args), worker, ("d", registration), {})
    assert sent == [("d", registration)]
    assert livepatch.counters == {"not_covered": 1}


def test_the_kernel_looks_after_an_idle_connection() -> None:
    """Else a firewall on the way forgets it, and the end of its process is never heard of."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as low:
        other, _ = server.accept()
        connection = last_to_close(low)
        Line(lambda line, message: None, lambda line, gone: None, context().stand_aside).take(connection)
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_NODELAY)]
        assert [connection.getsockopt(*option) != 0 for option in options] == [True, True]
        idle = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL]
        assert [connection.getsockopt(socket.IPPROTO_TCP, option) for option in idle] == [30, 30]
        other.close()


@pytest.mark.parametrize("changed", [{TOKEN: None}, {HOST: None}, {PORT: None}, {PORT: "80"}])
def test_a_registration_of_a_decode_worker_without_the_patch_is_the_releases_own_affair(
    changed: dict[str, Any],
) -> None:
    answers: Any = Answers(context())
    answers._say = lambda address, message: None
    assert answers.take({TOKEN: "t", HOST: "127.0.0.1", PORT: 9}) is not None
    assert answers.take({TOKEN: "t", HOST: "127.0.0.1", PORT: 9, **changed}) is None
