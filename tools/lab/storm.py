"""Load: clients that ask for what was stored, and hang up.

They come in waves. In a wave each client asks for the next turn of its conversation, or, where a conversation is a
single prompt, for a few of them, drawn anew; between two waves the engine's own prefix cache is reset (an engine
refuses to while requests hold blocks), so that what the next wave needs is loaded from the KV store, all at once. A
share of the requests is given up at a random moment. The draws depend on the seed and the client only: two engines
get the same requests and the same hang-ups.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from vllm_livepatch.tools.lab import model
from vllm_livepatch.tools.lab.client import Client, Messages, RequestFailed
from vllm_livepatch.tools.lab.loads import Conversations, Storm
from vllm_livepatch.tools.lab.tally import Tally

_PAUSE_AFTER_FAILURE = 0.5


@dataclass(frozen=True)
class Turn:
    """A request, and its undisturbed answer."""

    messages: Messages
    answer: str


class Visitors:
    """The clients of one server. ``engines``: those whose prefix caches are reset, by default the one that is asked.

    ``right``: the right answers where they are known, in place of those that this server gives undisturbed.
    """

    def __init__(
        self,
        client: Client,
        spec: Storm | Conversations,
        clients: int,
        seed: int,
        tally: Tally,
        engines: Sequence[Client] = (),
        right: Sequence[Sequence[Turn]] = (),
    ) -> None:
        self._client, self._spec, self._tally, self._right = client, spec, tally, right
        self._engines = engines or (client,)
        self._sessions = spec.sessions(seed)
        self._draws = [random.Random(f"{seed}/{number}") for number in range(clients)]
        self._sequels: list[Iterator[Turn]] = [iter(())] * clients
        self.turns: Sequence[Sequence[Turn]] = ()
        self._differ = 0

    async def undisturbed(self) -> int:
        """Ask for everything once, one after the other: the right answers, and how many they are."""
        if self._right:
            self.turns = self._right
            for turn in itertools.chain.from_iterable(self._right):
                self._differ += turn.answer != await self._client.complete(turn.messages, self._spec.output)
        else:
            self.turns = [await self._asked(session) for session in self._sessions]
        return sum(map(len, self.turns))

    async def _asked(self, session: tuple[str, ...]) -> list[Turn]:
        messages: Messages = ()
        turns: list[Turn] = []
        for words in session:
            messages = (*messages, words)
            turns.append(Turn(messages, await self._client.complete(messages, self._spec.output)))
            # What follows goes on from the right answer, whatever comes back under load.
            messages = (*messages, turns[-1].answer)
        return turns

    async def load(self, seconds: float) -> None:
        """For so long, not counting the calm. A request that fails is counted, and does not end the load."""
        tally = self._tally
        tally.go()
        end = None if tally.hang_ups_from is None else tally.elapsed() + seconds
        while True:
            if tally.hang_ups_from is None and tally.elapsed() >= self._spec.calm:
                tally.hang_ups_from = tally.elapsed()
                end = tally.hang_ups_from + seconds
            if end is not None and tally.elapsed() >= end:
                return
            for engine in self._engines:
                with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, RequestFailed):
                    tally.resets += await engine.reset_prefix_cache()
            await asyncio.gather(*(self._wave(number) for number in range(len(self._draws))))
            tally.waves += 1

    def figures(self) -> dict[str, Any]:
        """What is not in the tally: how many of the undisturbed answers are not the right ones."""
        return {"undisturbed_differ": self._differ} if self._right else {}

    async def _wave(self, number: int) -> None:
        calm = self._tally.hang_ups_from is None
        for _ in range(self._spec.requests):
            draw = self._draws[number]
            turn = next(self._sequels[number], None)
            if turn is None:
                self._sequels[number] = iter(draw.choice(self.turns))
                turn = next(self._sequels[number])
            impatient, patience = draw.random(), draw.random()
            stays = calm or impatient >= self._spec.share
            # Drawn only where it is asked for: the other draws are those of earlier runs.
            stops = self._spec.stops > 0 and draw.random() < self._spec.stops
            await self._request(number, turn, None if stays else patience * self._spec.within, stops)

    async def _request(self, number: int, turn: Turn, limit: float | None, stops: bool) -> None:
        tally = self._tally
        first = turn.answer.split()[0] if stops else None
        began = tally.elapsed()
        try:
            # A cancelled request closes its connection: to the server, the user has gone.
            answer = await asyncio.wait_for(
                self._ask(number, turn, None if first is None else model.token(first)), limit
            )
        except asyncio.TimeoutError:
            if limit is None:
                await self._failed(began, f"no answer within {self._spec.timeout:.0f} s")
            else:
                tally.note("disconnected")
        except RequestFailed as error:
            await self._failed(began, error.kind, str(error))
        except aiohttp.ClientError as error:
            await self._failed(began, type(error).__name__, str(error))
        else:
            tally.note("completed")
            tally.waits.append(tally.elapsed() - began)
            tally.mismatches += answer.strip() != first if first else answer != turn.answer

    async def _ask(self, number: int, turn: Turn, stop: int | None) -> str:
        # Neighbours differ in how they ask, not in what: with `half` and `half` all four ways are met.
        streamed = _chosen(self._spec.stream, "yes", number % 2 == 0)
        chat = _chosen(self._spec.api, "chat", number // 2 % 2 == 0)
        if not streamed:
            return await self._client.complete(turn.messages, self._spec.output, chat, stop)
        answer, times = await self._client.stream(turn.messages, self._spec.output, chat, stop)
        self._tally.first_tokens += times[:1]
        self._tally.gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
        return answer

    async def _failed(self, began: float, kind: str, message: str = "") -> None:
        self._tally.fail(kind, message)
        self._tally.waits.append(self._tally.elapsed() - began)
        await asyncio.sleep(_PAUSE_AFTER_FAILURE)


def _chosen(value: str, wanted: str, mine: bool) -> bool:
    return mine if value == "half" else value == wanted
