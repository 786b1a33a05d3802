"""The few calls of an OpenAI server that the lab makes."""

from __future__ import annotations

import json
import time
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

Messages = tuple[str, ...]
"""A conversation: the user's words, the answer to them, the user's next words, and so on."""


class RequestFailed(RuntimeError):
    """The server answered with an error. ``kind`` is short and without particulars; the message has them, cut short."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {detail[:160]}")


class Client:
    """Use as ``async with``. A conversation goes to the completions as one text, to the chat as messages of two roles.

    The lab's model renders both to the same tokens, so that the same greedy answer is right for both.
    """

    def __init__(self, url: str, model: str, timeout: float = 60.0) -> None:
        self._url, self._model = url, model
        # No limit on connections: each client of the load has its own.
        self._connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(connector=self._connector, timeout=aiohttp.ClientTimeout(total=timeout))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    async def complete(self, messages: Messages, tokens: int, chat: bool = False, stop: int | None = None) -> str:
        """The greedy answer, exactly ``tokens`` long; or to the token ``stop``, with it."""
        path, body = self._request(messages, tokens, chat, stop)
        async with self._http.post(f"{self._url}{path}", json=body) as answer:
            await _right(answer)
            choice = (await answer.json())["choices"][0]
        return str(choice["message"]["content"] if chat else choice["text"])

    async def stream(
        self, messages: Messages, tokens: int, chat: bool = False, stop: int | None = None
    ) -> tuple[str, list[float]]:
        """As ``complete``, a token at a time: the text, and when each piece came (seconds since the request)."""
        path, body = self._request(messages, tokens, chat, stop)
        text, times, begun = "", [], time.monotonic()
        async with self._http.post(f"{self._url}{path}", json=body | {"stream": True}) as answer:
            await _right(answer)
            async for line in answer.content:
                data = line.decode().removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "choices" not in event:
                    raise RequestFailed("error in the stream", data)
                choice = event["choices"][0]
                if chat and choice["delta"].get("role"):
                    continue  # says only who is speaking
                text += (choice["delta"].get("content") or "") if chat else choice["text"]
                times.append(time.monotonic() - begun)
        return text, times

    async def reset_prefix_cache(self) -> bool:
        """Empty the engine's own prefix cache; false where it would not (blocks are still held)."""
        async with self._http.post(f"{self._url}/reset_prefix_cache") as answer:
            await _right(answer)
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

    def _request(self, messages: Messages, tokens: int, chat: bool, stop: int | None) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": self._model, "temperature": 0, "ignore_eos": True}
        if stop is not None:
            body |= {"stop_token_ids": [stop], "include_stop_str_in_output": True}
        if not chat:
            return "/v1/completions", {**body, "prompt": " ".join(messages), "max_tokens": tokens}
        by_role = [
            {"role": "assistant" if number % 2 else "user", "content": words} for number, words in enumerate(messages)
        ]
        # max_completion_tokens alone: what current clients send; max_tokens is deprecated in the chat.
        return "/v1/chat/completions", {**body, "messages": by_role, "max_completion_tokens": tokens}


async def _right(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        raise RequestFailed(f"HTTP {answer.status}", await answer.text())
