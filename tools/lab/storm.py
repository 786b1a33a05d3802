"""Load: clients that ask for stored prompts, and hang up.

The storm comes in waves. In a wave each client asks for a few of the prompts that were stored before; between two
waves the engine's own prefix cache is reset (an engine refuses to while requests hold blocks), so that the next
wave's prompts are loaded from the KV store, all at once. A share of the requests is given up at a random moment.
The draws depend on the seed and the client only: two engines get the same requests and the same hang-ups.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

_PAUSE_AFTER_FAILURE = 0.5


@dataclass(frozen=True)
class Load:
    """How much of what. Times in seconds."""

    prompts: tuple[str, ...]
    seconds: float = 120.0
    calm: float = 5.0
    """The first seconds, in which nobody hangs up (to the end of a wave). They come on top of ``seconds``."""
    clients: int = 24
    requests_a_wave: int = 2
    disconnect_share: float = 0.6
    disconnect_within: float = 0.4
    output_tokens: int = 16
    request_timeout: float = 60.0
    streamed: bool = False
    """Ask for tokens as they come, and time the first and the gaps."""
    seed: int = 1


@dataclass
class Tally:
    """What became of the requests. Filled while the storm runs: it is right also when the storm is cut short."""

    events: list[tuple[float, str]] = field(default_factory=list)
    """Seconds since the begin, and ``completed``, ``disconnected`` or ``failed``."""
    mismatches: int = 0
    """Completions whose output is not the expected one."""
    errors: Counter[str] = field(default_factory=Counter)
    first_tokens: list[float] = field(default_factory=list)
    """Seconds to the first token of each streamed completion."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens of streamed completions."""
    resets: int = 0
    waves: int = 0
    begun: float = 0.0
    hang_ups_from: float | None = None
    """Seconds since the begin; the first wave that is not calm."""

    def count(self, kind: str) -> int:
        return sum(1 for _, event in self.events if event == kind)

    def per_second(self, kind: str) -> list[int]:
        """How many in each second, from the first to the last in which anything happened."""
        bins = [0] * (int(max((when for when, _ in self.events), default=-1.0)) + 1)
        for when, event in self.events:
            bins[int(when)] += event == kind
        return bins

    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def note(self, kind: str) -> None:
        self.events.append((self.elapsed(), kind))


class RequestFailed(RuntimeError):
    """The server answered with an error; the message is its status and text, cut short."""


class Client:
    """The few calls of an OpenAI server that the lab makes. ``async with``."""

    def __init__(self, url: str, model: str, timeout: float = 60.0) -> None:
        self._url, self._model = url, model
        # No limit on connections: each client of the storm has its own.
        self._connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(connector=self._connector, timeout=aiohttp.ClientTimeout(total=timeout))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    async def complete(self, prompt: str, tokens: int) -> str:
        """The greedy completion, exactly ``tokens`` long."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        async with self._http.post(f"{self._url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise RequestFailed(f"HTTP {answer.status}: {(await answer.text())[:160]}")
            return str((await answer.json())["choices"][0]["text"])

    async def stream(self, prompt: str, tokens: int) -> tuple[str, list[float]]:
        """As ``complete``, a token at a time: the text, and when each piece came (seconds since the request)."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        text, times, begun = "", [], time.monotonic()
        async with self._http.post(f"{self._url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise RequestFailed(f"HTTP {answer.status}: {(await answer.text())[:160]}")
            async for line in answer.content:
                data = line.decode().removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "choices" not in event:
                    raise RequestFailed(f"error in the stream: {data[:160]}")
                text += event["choices"][0]["text"]
                times.append(time.monotonic() - begun)
        return text, times

    async def reset_prefix_cache(self) -> bool:
        """Empty the engine's own prefix cache; false where it would not (blocks are still held)."""
        async with self._http.post(f"{self._url}/reset_prefix_cache") as answer:
            if answer.status != 200:
                raise RequestFailed(f"HTTP {answer.status}: {(await answer.text())[:160]}")
            text = await answer.text()  # older releases answer with nothing
            return not text or bool((await answer.json()).get("success", True))

    async def metric(self, name: str) -> float:
        """The sum of a gauge or counter over its labels. ``KeyError`` if the server has no such metric."""
        async with self._http.get(f"{self._url}/metrics") as answer:
            text = await answer.text()
        values = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]
        if not values:
            raise KeyError(name)
        return float(sum(values))


async def warm(client: Client, load: Load) -> dict[str, str]:
    """Ask for each prompt once, in order; the outputs, by prompt."""
    return {prompt: await client.complete(prompt, load.output_tokens) for prompt in load.prompts}


async def storm(
    client: Client, load: Load, expected: dict[str, str], tally: Tally, engines: Sequence[Client] = ()
) -> None:
    """Run the load to its end, into ``tally``. A request that fails is counted, and does not end the storm.

    ``engines`` are those whose prefix caches are reset between two waves: by default the one that is asked.
    """
    tally.begun = time.monotonic()
    users = [_User(client, load, expected, tally, number) for number in range(load.clients)]
    while True:
        if tally.hang_ups_from is None and tally.elapsed() >= load.calm:
            tally.hang_ups_from = tally.elapsed()
        if tally.hang_ups_from is not None and tally.elapsed() - tally.hang_ups_from >= load.seconds:
            return
        for engine in engines or (client,):
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, RequestFailed):
                tally.resets += await engine.reset_prefix_cache()
        await asyncio.gather(*(user.wave(calm=tally.hang_ups_from is None) for user in users))
        tally.waves += 1


async def drained(client: Client, load: Load, deadline: float = 30.0) -> float:
    """The KV usage (0 to 1) once it is back to 0, or what it still is at the deadline (seconds)."""
    begun, nudged = time.monotonic(), 0.0
    while True:
        # The gauge is published by steps of the engine: an idle one goes on showing what its last step saw.
        if time.monotonic() - nudged > 2:
            await client.complete(" ".join(load.prompts[0].split()[:4]), 1)
            nudged = time.monotonic()
        usage = await client.metric("vllm:kv_cache_usage_perc")
        if usage == 0 or time.monotonic() - begun > deadline:
            return usage
        await asyncio.sleep(0.2)


class _User:
    def __init__(self, client: Client, load: Load, expected: dict[str, str], tally: Tally, number: int) -> None:
        self._client, self._load, self._expected, self._tally = client, load, expected, tally
        self._draw = random.Random(f"{load.seed}/{number}")

    async def wave(self, calm: bool) -> None:
        for _ in range(self._load.requests_a_wave):
            await self._request(calm)

    async def _request(self, calm: bool) -> None:
        load, tally, draw = self._load, self._tally, self._draw
        prompt, impatient, patience = draw.choice(load.prompts), draw.random(), draw.random()
        limit = None if calm or impatient >= load.disconnect_share else patience * load.disconnect_within
        try:
            # A cancelled request closes its connection: to the server, the user has gone.
            output = await asyncio.wait_for(self._ask(prompt), limit)
        except asyncio.TimeoutError:
            if limit is None:
                await self._failed(f"no answer within {load.request_timeout:.0f} s")
            else:
                tally.note("disconnected")
        except (aiohttp.ClientError, RequestFailed) as error:
            await self._failed(f"{type(error).__name__}: {error}")
        else:
            tally.note("completed")
            tally.mismatches += output != self._expected[prompt]

    async def _ask(self, prompt: str) -> str:
        if not self._load.streamed:
            return await self._client.complete(prompt, self._load.output_tokens)
        output, times = await self._client.stream(prompt, self._load.output_tokens)
        self._tally.first_tokens += times[:1]
        self._tally.gaps += [later - earlier for earlier, later in pairwise(times)]
        return output

    async def _failed(self, why: str) -> None:
        self._tally.note("failed")
        self._tally.errors[why] += 1
        await asyncio.sleep(_PAUSE_AFTER_FAILURE)


def summary(tally: Tally) -> dict[str, Any]:
    """The tally for JSON."""
    kinds = ("completed", "disconnected", "failed")
    return {
        **{kind: tally.count(kind) for kind in kinds},
        "mismatches": tally.mismatches,
        "hang_ups_from": tally.hang_ups_from,
        "waves": tally.waves,
        "prefix_cache_resets": tally.resets,
        "errors": dict(tally.errors.most_common(5)),
        "per_second": {kind: tally.per_second(kind) for kind in kinds},
    }
