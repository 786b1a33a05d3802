"""What each engine of a running topology holds and costs, over time."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp
import psutil
from vllm_livepatch.tools.lab.tally import Tally

SAMPLE_SECONDS = 0.5
_LOADED = "external_prefix_cache_hits_total"
_KINDS = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting", _LOADED)
_GAUGE = re.compile(rf"^vllm:({'|'.join(_KINDS)})(?:\{{[^}}]*\}})? (\S+)$", re.M)


@dataclass(frozen=True)
class Sample:
    """An engine at one moment."""

    at: float
    """Seconds since the load began."""
    used: float
    """The share (0 to 1) of its KV blocks that requests hold."""
    requests: int
    """Running and waiting ones. Blocks that are used with none of them are held for somebody else."""
    cores: float
    """Processor seconds a second, of all its processes, since the sample before."""
    loaded: int = 0
    """Tokens that came from a KV store or another engine, so far."""


class Watch:
    """Samples of each engine. ``urls`` are theirs, by part."""

    def __init__(
        self, urls: Mapping[str, str], processes: Callable[[], Iterable[Mapping[str, Any]]], tally: Tally
    ) -> None:
        self._urls, self._processes, self._tally = urls, processes, tally
        self._spent: dict[str, tuple[float, float]] = {}
        self.samples: dict[str, list[Sample]] = {name: [] for name in urls}

    async def look(self) -> None:
        """Look until cancelled; an engine that does not answer leaves a gap."""
        await self._tally.going.wait()
        self._spent.clear()  # between two rounds of load nobody looked
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
            while True:
                spent = processor_seconds(self._processes())
                for name in self._urls:
                    with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, KeyError):
                        gauges = await _gauges(http, self._urls[name])
                        at = self._tally.elapsed()
                        cores = self._cores(name, spent.get(name, 0.0), at)
                        requests = gauges.get("num_requests_running", 0) + gauges.get("num_requests_waiting", 0)
                        used, loaded = gauges["kv_cache_usage_perc"], int(gauges.get(_LOADED, 0))
                        self.samples[name].append(Sample(round(at, 2), used, int(requests), round(cores, 3), loaded))
                await asyncio.sleep(SAMPLE_SECONDS)

    def _cores(self, name: str, spent: float, at: float) -> float:
        before, when = self._spent.get(name, (spent, at - 1.0))
        self._spent[name] = (spent, at)
        return max(0.0, spent - before) / max(at - when, 0.001)  # a part that came back begins anew

    def result(self) -> dict[str, Any]:
        """For JSON: `kv_usage`, `requests` and `cores`, pairs of moment and value by engine, and `held` by engine."""
        return {
            **{
                title: {name: [(sample.at, getattr(sample, kind)) for sample in taken] for name, taken in self._all()}
                for title, kind in (("kv_usage", "used"), ("requests", "requests"), ("cores", "cores"))
            },
            "held": {name: held(taken) for name, taken in self._all()},
        }

    def loaded_again(self, moment: float) -> float | None:
        """Seconds from a moment of the load until an engine had loaded something that it asked for after it."""
        found = [
            b.at
            for taken in self.samples.values()
            for a, b in pairwise(taken)
            if moment <= a.at and a.loaded < b.loaded
        ]
        return round(min(found) - moment, 1) if found else None

    def _all(self) -> Iterable[tuple[str, list[Sample]]]:
        return ((name, taken) for name, taken in self.samples.items() if taken)


def held(samples: list[Sample]) -> dict[str, float | None]:
    """What an engine held with no request of its own to be served, and what it cost.

    `seconds`: for how long, in all; `share`: of the KV blocks, at most; `last`: when it was last seen (seconds of
    load); `cores_then`, `cores_else`: processor seconds a second while it held blocks and served nobody, and while it
    held none and served nobody. None where there was no such moment.
    """
    pairs = list(pairwise(samples))
    # What a process used is in the sample that ends the time.
    still = [(a, b) for a, b in pairs if a.requests == 0 and b.requests == 0]
    with_blocks = [(a, b) for a, b in still if a.used > 0 and b.used > 0]
    without = [(a, b) for a, b in still if a.used == 0 and b.used == 0]
    return {
        "seconds": round(sum(b.at - a.at for a, b in with_blocks), 1),
        "share": max((b.used for _, b in with_blocks), default=0.0),
        "last": max((b.at for _, b in with_blocks), default=None),
        "cores_then": _mean(with_blocks),
        "cores_else": _mean(without),
    }


def _mean(pairs: list[tuple[Sample, Sample]]) -> float | None:
    seconds = sum(b.at - a.at for a, b in pairs)
    return round(sum(b.cores * (b.at - a.at) for a, b in pairs) / seconds, 3) if seconds else None


def processor_seconds(processes: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Processor seconds so far, by part; ``processes`` as ``Supervisor.processes`` gives them."""
    spent: dict[str, float] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(process["pid"]).cpu_times()
            spent[process["part"]] = spent.get(process["part"], 0.0) + times.user + times.system
    return spent


async def _gauges(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The gauges of an engine, added up over their labels; KeyError later where it has none."""
    async with http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    found: dict[str, float] = {}
    for name, value in _GAUGE.findall(text):  # (a whole parse takes 30 ms of a processor, here twice a second)
        found[name] = found.get(name, 0.0) + float(value)
    return found
