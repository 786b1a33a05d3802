"""The load generator, against a server of a few lines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from aiohttp import web
from vllm_livepatch.tools.lab.client import Client, RequestFailed
from vllm_livepatch.tools.lab.loads import Conversations, Storm
from vllm_livepatch.tools.lab.setups import drained
from vllm_livepatch.tools.lab.storm import Visitors
from vllm_livepatch.tools.lab.tally import Tally, quantiles

T = TypeVar("T")
LOAD = Storm(prompts=3, tokens=5, stream="no")
CLIENTS, SEED, SECONDS = 6, 3, 1.0


class Server:
    """Answers what is said with itself backwards, after ``delay`` seconds; ``usage`` is what /metrics shows, in turn."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.asked: list[str] = []
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.cut_short = 0
        self.fails = self.lies = self.stops = False
        self.answer = ""
        self.resets = 0
        self.usage = [0.0]

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        chat = request.path.endswith("chat/completions")
        text = " ".join(message["content"] for message in body["messages"]) if chat else body["prompt"]
        self.asked.append(text)
        self.bodies.append((request.path, body))
        if self.fails:
            return web.Response(status=500, text="engine is dead")
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cut_short += 1
            raise
        text = "wrong" if self.lies else self.answer or backwards(text)
        if self.stops and "stop_token_ids" in body:
            text = text.split()[0]
        if not body.get("stream"):
            return web.json_response({"choices": [{"message": {"content": text}} if chat else {"text": text}]})
        answer = web.StreamResponse()
        await answer.prepare(request)
        first = [{"delta": {"role": "assistant", "content": ""}}] if chat else []
        for choice in [*first, *({"delta": {"content": letter}} if chat else {"text": letter} for letter in text)]:
            await answer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def reset(self, request: web.Request) -> web.Response:
        self.resets += 1
        return web.json_response({"success": self.resets % 2 == 0})

    async def metrics(self, request: web.Request) -> web.Response:
        usage = self.usage.pop(0) if len(self.usage) > 1 else self.usage[0]
        lines = [f'vllm:kv_cache_usage_perc{{engine="{number}"}} {usage / 2}' for number in (0, 1)]
        return web.Response(text="\n".join(["# TYPE vllm:kv_cache_usage_perc gauge", *lines, ""]))


def backwards(text: str) -> str:
    """Short, since it is said again in the next turn."""
    return text[::-1][:20].strip()


def against(server: Server, work: Callable[[Client], Awaitable[T]]) -> T:
    async def run() -> T:
        app = web.Application()
        app.router.add_post("/v1/completions", server.complete)
        app.router.add_post("/v1/chat/completions", server.complete)
        app.router.add_post("/reset_prefix_cache", server.reset)
        app.router.add_get("/metrics", server.metrics)
        # A handler learns of a client that went away only if it asks for that.
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with Client(f"http://127.0.0.1:{runner.addresses[0][1]}", "tiny") as client:
                return await work(client)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def visitors(client: Client, load: Storm | Conversations, tally: Tally, clients: int = CLIENTS) -> Visitors:
    return Visitors(client, load, clients, SEED, tally)


def stormed(server: Server, load: Storm | Conversations, seconds: float = SECONDS, clients: int = CLIENTS) -> Tally:
    """The tally of a load after an undisturbed run, which the server's whims begin after."""

    async def work(client: Client) -> Tally:
        tally = Tally()
        found = visitors(client, load, tally, clients)
        whims, server.fails, server.lies, server.delay = (server.fails, server.lies, server.delay), False, False, 0
        await found.undisturbed()
        server.fails, server.lies, server.delay = whims
        server.asked.clear()
        server.bodies.clear()
        await found.load(seconds)
        return tally

    return against(server, work)


def test_undisturbed_asks_for_each_prompt_once() -> None:
    server = Server()

    async def work(client: Client) -> Visitors:
        found = visitors(client, LOAD, Tally())
        assert await found.undisturbed() == 3
        return found

    found = against(server, work)
    assert server.asked == [turn.messages[0] for (turn,) in found.turns]
    assert [turn.answer for (turn,) in found.turns] == [backwards(asked) for asked in server.asked]
    assert {len(asked.split()) for asked in server.asked} == {5}


def test_where_the_right_answers_are_known_the_undisturbed_ones_are_compared_with_them() -> None:
    server = Server()

    async def work(client: Client) -> list[Visitors]:
        known = visitors(client, Conversations(conversations=2, turns=3, prefix=6, tokens=2), Tally())
        await known.undisturbed()
        asked, found = list(server.asked), []
        for server.lies in (False, True):
            server.asked.clear()
            found.append(Visitors(client, Conversations(), CLIENTS, SEED, Tally(), right=known.turns))
            assert await found[-1].undisturbed() == 6
            assert server.asked == asked, "later turns go on from the right answers"
            assert found[-1].turns is known.turns
        return [known, *found]

    assert [found.figures() for found in against(server, work)] == [
        {},
        {"undisturbed_differ": 0},
        {"undisturbed_differ": 6},
    ]


def test_the_impatient_hang_up_and_the_server_sees_them_go() -> None:
    server = Server(delay=0.5)
    tally = stormed(server, LOAD)
    found = tally.summary(SECONDS)
    assert found["completed"] > 0
    assert found["disconnected"] > 0
    assert found["disconnected"] == server.cut_short
    assert found["completed"] + found["disconnected"] == len(server.asked)
    assert (found["failed"], found["mismatches"], found["errors"]) == (0, 0, {})
    assert sum(found["per_second"]["completed"]) == found["completed"]
    assert found["goodput"] == found["completed"] / SECONDS
    assert found["waves"] == server.resets
    assert found["prefix_cache_resets"] == server.resets // 2
    assert found["first_token"] is None
    assert server.delay <= found["longest_wait"] == round(max(tally.waits), 1)
    assert len(tally.waits) == found["completed"], "who hangs up does not wait"


def test_nobody_hangs_up_in_the_calm() -> None:
    server = Server(delay=0.5)
    tally = stormed(server, replace(LOAD, calm=0.7), seconds=0)
    assert {kind for _, kind in tally.events} == {"completed"}
    assert server.cut_short == 0


def test_the_same_seed_asks_for_the_same_and_another_for_something_else() -> None:
    def asked(seed: int) -> list[str]:
        server = Server()

        async def work(client: Client) -> None:
            found = Visitors(client, replace(LOAD, requests=20, share=0.0), 1, seed, Tally())
            await found.undisturbed()
            await found.load(0.01)

        against(server, work)
        return server.asked[:23]

    assert asked(3) == asked(3) != asked(4)


def test_conversations_begin_alike_come_back_longer_and_are_right_where_the_answers_are() -> None:
    server = Server()
    load = Conversations(conversations=4, turns=3, prefix=6, tokens=2, stream="no", share=0.0)
    tally = stormed(server, load, seconds=0.2, clients=1)
    assert (tally.count("failed"), tally.mismatches) == (0, 0)
    assert len({" ".join(asked.split()[:6]) for asked in server.asked}) == 1
    first, second, third = server.asked[:3]
    assert (len(first.split()), len(server.asked[3].split())) == (8, 8)
    assert second.startswith(f"{first} {backwards(first)} ")
    assert third.startswith(f"{second} {backwards(second)} ")


def test_streamed_and_not_completions_and_chat_are_all_asked_for_and_all_right() -> None:
    server = Server()
    load = Conversations(conversations=4, turns=2, prefix=6, tokens=2, stream="half", api="half", share=0.0)
    tally = stormed(server, load, seconds=0.2)
    ways = {(path, body.get("stream", False)) for path, body in server.bodies}
    assert ways == {(f"/v1/{path}", streamed) for path in ("completions", "chat/completions") for streamed in (0, 1)}
    assert tally.count("completed") == len(server.asked)
    assert (tally.count("failed"), tally.mismatches) == (0, 0)
    assert 0 < len(tally.first_tokens) < tally.count("completed")
    for path, body in server.bodies:
        chat = path.endswith("chat/completions")
        assert {"max_tokens", "max_completion_tokens"} & set(body) == {
            "max_completion_tokens" if chat else "max_tokens"
        }
        if chat:
            assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"][
                : len(body["messages"])
            ]


@pytest.mark.parametrize("stream", ["yes", "no"])
def test_a_share_of_requests_ends_with_the_first_token_of_the_answer(stream: str) -> None:
    server = Server()
    server.answer = "w40 w7 w9"
    tally = stormed(server, replace(LOAD, stream=stream, share=0.0, stops=0.5), seconds=0.3)
    stops = [body for _, body in server.bodies if "stop_token_ids" in body]
    assert {(*body["stop_token_ids"], body["include_stop_str_in_output"]) for body in stops} == {(43, True)}
    assert 0 < len(stops) < len(server.bodies)
    assert tally.mismatches == len(stops), "this server does not stop"
    server.stops = True
    assert stormed(server, replace(LOAD, stream=stream, share=0.0, stops=0.5), seconds=0.3).mismatches == 0


def test_a_failure_is_counted_by_its_kind_and_does_not_end_the_load() -> None:
    server = Server()
    server.fails = True
    found = stormed(server, LOAD).summary(SECONDS)
    assert found["failed"] == len(server.asked) > CLIENTS
    assert found["errors"] == {"HTTP 500": found["failed"]}
    assert found["error_examples"] == {"HTTP 500": "HTTP 500: engine is dead"}


def test_an_output_that_is_not_the_expected_one_is_counted_and_no_good() -> None:
    server = Server()
    server.lies = True
    found = stormed(server, LOAD, seconds=0.1).summary(0.1)
    assert found["mismatches"] == found["completed"] > 0
    assert found["goodput"] == 0


def test_a_server_that_never_answers_is_a_failure_and_not_a_disconnect() -> None:
    server = Server()

    async def work(client: Client) -> Tally:
        tally = Tally()
        found = visitors(client, replace(LOAD, share=0.0, timeout=0.2), tally)
        await found.undisturbed()
        server.delay = 30
        async with Client(client._url, "tiny", timeout=0.2) as found._client:
            await found.load(SECONDS)
        return tally

    tally = against(server, work)
    assert {kind for _, kind in tally.events} == {"failed"}
    assert set(tally.errors) == {"no answer within 0 s"}
    assert len(tally.waits) == tally.count("failed")
    assert min(tally.waits) >= 0.2, "until it was given up as failed"


def test_a_load_in_two_rounds_is_one_load_on_a_clock_that_rests_between() -> None:
    async def work(client: Client) -> tuple[Tally, float, float, float]:
        began, tally = time.monotonic(), Tally()
        found = visitors(client, replace(LOAD, calm=0.2), tally)
        await found.undisturbed()
        await found.load(0.3)
        tally.pause()
        rested = tally.elapsed()
        await asyncio.sleep(0.3)
        assert tally.elapsed() == rested
        await found.load(0.3)
        return tally, rested, tally.elapsed(), time.monotonic() - began

    tally, rested, elapsed, in_all = against(Server(), work)
    assert rested >= 0.5
    assert 0.8 <= elapsed <= in_all - 0.3
    assert max(when for when, _ in tally.events) > rested


def test_drained_waits_for_usage_to_be_back_and_gives_up_at_its_deadline() -> None:
    server = Server()
    server.usage = [0.5, 0.25, 0.0]
    assert against(server, drained) == 0
    assert server.asked == ["w1 w2 w3 w4"]
    server.usage = [0.5]
    assert against(server, lambda client: drained(client, deadline=0.3)) == 0.5


def test_an_unknown_metric_and_a_refused_request_are_errors() -> None:
    with pytest.raises(KeyError, match="vllm:nothing"):
        against(Server(), lambda client: client.metric("vllm:nothing"))
    server = Server()
    server.fails = True
    with pytest.raises(RequestFailed, match="HTTP 500: engine is dead"):
        against(server, lambda client: client.complete(("a",), 1))


def test_per_second_counts_every_event_once() -> None:
    events = [(0.2, "completed"), (0.9, "failed"), (2.0, "completed"), (2.1, "completed")]
    tally: Any = Tally(events=events)
    assert tally.per_second("completed") == [1, 0, 2]
    assert tally.per_second("failed") == [1, 0, 0]
    assert Tally().per_second("completed") == []


def test_a_death_is_the_first_failure_after_the_last_answer() -> None:
    events = [(0.5, "failed"), (2.0, "completed"), (2.5, "disconnected"), (2.75, "failed"), (3.0, "failed")]
    assert Tally(events=events, hang_ups_from=2.0).died_after() == 0.75
    assert Tally(events=[(2.0, "completed")], hang_ups_from=None, _before=4.0).died_after() == 4.0


def test_quantiles_are_of_seconds_and_none_of_nothing() -> None:
    assert quantiles([]) is None
    assert quantiles([0.25]) == {"0.5": 0.25, "0.9": 0.25, "0.99": 0.25}
    assert quantiles([number / 100 for number in range(101)]) == {"0.5": 0.5, "0.9": 0.9, "0.99": 0.99}
