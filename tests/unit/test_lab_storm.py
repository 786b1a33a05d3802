"""The load generator, against a server of a few lines."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from aiohttp import web
from vllm_livepatch.tools.lab.storm import Client, Load, RequestFailed, Tally, drained, storm, summary, warm

T = TypeVar("T")
LOAD = Load(prompts=("a b c d e", "f g h i j", "k l m n o"), seconds=1.0, calm=0.0, clients=6, seed=3)


class Server:
    """Answers a prompt with itself backwards, after ``delay`` seconds; ``usage`` is what /metrics shows, in turn."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.asked: list[str] = []
        self.cut_short = 0
        self.fails = self.lies = False
        self.resets = 0
        self.usage = [0.0]

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body["prompt"])
        if self.fails:
            return web.Response(status=500, text="engine is dead")
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cut_short += 1
            raise
        text = "wrong" if self.lies else body["prompt"][::-1]
        return web.json_response({"choices": [{"text": text}]})

    async def reset(self, request: web.Request) -> web.Response:
        self.resets += 1
        return web.json_response({"success": self.resets % 2 == 0})

    async def metrics(self, request: web.Request) -> web.Response:
        usage = self.usage.pop(0) if len(self.usage) > 1 else self.usage[0]
        lines = [f'vllm:kv_cache_usage_perc{{engine="{number}"}} {usage / 2}' for number in (0, 1)]
        return web.Response(text="\n".join(["# TYPE vllm:kv_cache_usage_perc gauge", *lines, ""]))


def against(server: Server, work: Callable[[Client], Awaitable[T]]) -> T:
    async def run() -> T:
        app = web.Application()
        app.router.add_post("/v1/completions", server.complete)
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


def stormed(server: Server, load: Load) -> Tally:
    async def work(client: Client) -> Tally:
        tally = Tally()
        await storm(client, load, {prompt: prompt[::-1] for prompt in load.prompts}, tally)
        return tally

    return against(server, work)


def test_warm_asks_for_each_prompt_once() -> None:
    server = Server()
    outputs = against(server, lambda client: warm(client, LOAD))
    assert outputs == {prompt: prompt[::-1] for prompt in LOAD.prompts}
    assert server.asked == list(LOAD.prompts)


def test_the_impatient_hang_up_and_the_server_sees_them_go() -> None:
    server = Server(delay=0.5)
    tally = stormed(server, LOAD)
    found = summary(tally)
    assert found["completed"] > 0
    assert found["disconnected"] > 0
    assert found["disconnected"] == server.cut_short
    assert found["completed"] + found["disconnected"] == len(server.asked)
    assert (found["failed"], found["mismatches"], found["errors"]) == (0, 0, {})
    assert sum(found["per_second"]["completed"]) == found["completed"]
    assert found["waves"] == server.resets
    assert found["prefix_cache_resets"] == server.resets // 2


def test_nobody_hangs_up_in_the_calm() -> None:
    server = Server(delay=0.5)
    tally = stormed(server, replace(LOAD, calm=0.7, seconds=0))
    assert {kind for _, kind in tally.events} == {"completed"}
    assert server.cut_short == 0


def test_the_same_seed_asks_for_the_same_and_another_for_something_else() -> None:
    def asked(seed: int) -> list[str]:
        server = Server()
        load = replace(LOAD, clients=1, requests_a_wave=20, seconds=0.01, disconnect_share=0, seed=seed)
        stormed(server, load)
        return server.asked[:20]

    assert asked(3) == asked(3) != asked(4)


def test_a_failure_is_counted_with_its_reason_and_does_not_end_the_storm() -> None:
    server = Server()
    server.fails = True
    found = summary(stormed(server, LOAD))
    assert found["failed"] == len(server.asked) > LOAD.clients
    assert found["errors"] == {"RequestFailed: HTTP 500: engine is dead": found["failed"]}


def test_an_output_that_is_not_the_expected_one_is_counted() -> None:
    server = Server()
    server.lies = True
    found = summary(stormed(server, replace(LOAD, seconds=0.1)))
    assert found["mismatches"] == found["completed"] > 0


def test_a_server_that_never_answers_is_a_failure_and_not_a_disconnect() -> None:
    async def work(client: Client) -> Tally:
        tally = Tally()
        async with Client(client._url, "tiny", timeout=0.2) as hasty:
            await storm(hasty, replace(LOAD, disconnect_share=0, request_timeout=0.2), defaultdict(str), tally)
        return tally

    tally = against(Server(delay=30), work)
    assert {kind for _, kind in tally.events} == {"failed"}
    assert set(tally.errors) == {"no answer within 0 s"}


def test_drained_waits_for_usage_to_be_back_and_gives_up_at_its_deadline() -> None:
    server = Server()
    server.usage = [0.5, 0.25, 0.0]
    assert against(server, lambda client: drained(client, LOAD)) == 0
    assert server.asked == ["a b c d"]
    server.usage = [0.5]
    assert against(server, lambda client: drained(client, LOAD, deadline=0.3)) == 0.5


def test_an_unknown_metric_and_a_refused_request_are_errors() -> None:
    with pytest.raises(KeyError, match="vllm:nothing"):
        against(Server(), lambda client: client.metric("vllm:nothing"))
    server = Server()
    server.fails = True
    with pytest.raises(RequestFailed, match="HTTP 500: engine is dead"):
        against(server, lambda client: client.complete("a", 1))


def test_per_second_counts_every_event_once() -> None:
    events = [(0.2, "completed"), (0.9, "failed"), (2.0, "completed"), (2.1, "completed")]
    tally: Any = Tally(events=events)
    assert tally.per_second("completed") == [1, 0, 2]
    assert tally.per_second("failed") == [1, 0, 0]
    assert Tally().per_second("completed") == []
