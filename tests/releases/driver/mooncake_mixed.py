# mypy: disable-error-code="import-not-found"
"""Let one of Mooncake's engines with this process's bundle, or none, meet one of another process with another, or none.

`mooncake_mixed.py PATIENCE ROLE BUNDLE`: PATIENCE is mooncake_engines.py's. ROLE is this process's engine, `prefill` or
`decode`. BUNDLE is the other's, a folder or `none`. Nothing fails here. Print one JSON object: what decode hears and has of
each request, and how many blocks prefill lacks then.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import halves
import mooncake_engines as engines
import mooncake_sides as sides
import real_scheduler as real
import vllm
from mooncake_engines import PROMPT, SIZE, Pair, Prefill
from mooncake_sides import Side
from ports import free_port
from result import leave, print_result, wait
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

SCRIPT = str(Path(__file__).resolve())
PART = 4 * SIZE + 8
"""Tokens of a prompt that is shorter, and begins as the others of its content do."""


class PrefillHalf(halves.Half):
    """A prefill engine. It steps when it is told to."""

    def __init__(self, model_config: Any) -> None:
        self.engine = Prefill(model_config, free_port())

    def who(self) -> tuple[str, int]:
        return self.engine.side.engine_id, self.engine.side.port

    def compute(self, name: str, prompt: int, content: int) -> None:
        self.engine.compute(name, prompt, content)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.engine.step()

    def abort(self, name: str) -> None:
        self.engine.abort(f"p-{name}")
        self.engine.step()

    def asked(self, name: str) -> bool:
        """Decode has asked for it."""
        return wait(lambda: name in self.engine.worker.reqs_need_send)

    def lacks(self) -> int:
        """Blocks that do not come back."""

        def back() -> bool:
            self.engine.step()
            return not self.engine.taken()

        wait(back)
        return self.engine.taken()


class DecodeHalf(Pair, halves.Half):
    """A decode engine's worker, and the blocks of a pair's that it asks into."""

    def __init__(self, model_config: Any) -> None:
        self.decode = Side(model_config, "kv_consumer", "decode", free_port())
        self._next = 1
        self._places: dict[str, list[int]] = {}

    def meet(self, engine_id: str, port: int) -> None:
        """Who is asked from now on."""
        self.prefill: Any = SimpleNamespace(side=SimpleNamespace(engine_id=engine_id, port=port))

    def asks(self, names: Sequence[str], blocks: int) -> None:
        """Ask for the last blocks of prompts, in one step."""
        self._places.update({name: self.places(name, blocks) for name in names})
        self.decode.step()

    def hangs_up(self, name: str) -> None:
        """A client goes before its request was admitted."""
        self.lets_go(name)

    def came_of(self, name: str, prompt: int, content: int) -> list[Any]:
        """What is heard of a request, and how many of its blocks hold what they are to hold."""
        places = self._places[name]
        return [self.outcome(name, places), self.came(places, content=content, prompt=prompt)]


def story(prefill: Any, decode: Any) -> dict[str, Any]:
    """Requests that decode asks for before, amid and after their prefills, some at once; and hang-ups at either."""
    decode.do("meet", *prefill.do("who"))

    def after(name: str, content: int) -> list[Any]:
        prefill.do("compute", name, PROMPT, content)
        prefill.do("steps", 5)
        decode.do("asks", [name], 8)
        return [decode.do("came_of", name, PROMPT, content), prefill.do("lacks")]

    result: dict[str, Any] = {"after": after("after", 0)}
    decode.do("asks", ["before"], 8)
    prefill.do("asked", "before")
    prefill.do("compute", "before", PROMPT, 1)
    prefill.do("steps", 5)
    result["before"] = [decode.do("came_of", "before", PROMPT, 1), prefill.do("lacks")]
    prefill.do("compute", "amid", PROMPT, 2)
    prefill.do("steps", 2)
    decode.do("asks", ["amid"], 8)
    prefill.do("asked", "amid")
    prefill.do("steps", 3)
    result["amid"] = [decode.do("came_of", "amid", PROMPT, 2), prefill.do("lacks")]
    crowd = [f"one of {number}" for number in range(6)]
    decode.do("asks", crowd, 5)  # of prompts that share their first blocks, which prefill has from the second on
    for number, name in enumerate(crowd):
        prefill.do("compute", name, PART, 3 + number % 2)
    prefill.do("steps", 8)
    came = [decode.do("came_of", name, PART, 3 + number % 2) for number, name in enumerate(crowd)]
    result["a crowd"] = [came, prefill.do("lacks")]
    prefill.do("compute", "hangs up", PROMPT, 5)
    prefill.do("steps", 5)
    decode.do("hangs_up", "hangs up")
    result["decode's client hangs up"] = prefill.do("lacks")
    prefill.do("compute", "aborted", PROMPT, 6)
    prefill.do("steps", 2)
    prefill.do("abort", "aborted")
    result["prefill's client hangs up"] = prefill.do("lacks")
    result["the last"] = after("last", 7)
    return result


def main() -> None:
    real.quiet()
    os.environ[engines.ABORT] = "600"
    _, role, given, *more = sys.argv[1:]
    halved = {"prefill": PrefillHalf, "decode": DecodeHalf}
    with tempfile.TemporaryDirectory() as directory:
        # The other process begins at once: both take a while to import what they are made of.
        other_role = "decode" if role == "prefill" else "prefill"
        other = halves.Other(SCRIPT, [sys.argv[1], other_role, "none", "other"], given) if not more else None
        model_config = real.make_model_config(Path(directory))
        sides.begin_distributed(model_config, Path(directory) / "rendezvous")
        init_none_hash(sha256)
        half = halved[role](model_config)
        if other is None:
            half.serve()
            leave()
        other.step = half.step
        result = story(half, other) if role == "prefill" else story(other, half)
        other.end()
    print_result({"pid": os.getpid(), "cases": result}, vllm)
    leave()


if __name__ == "__main__":
    main()
