# mypy: disable-error-code="import-not-found"
"""Drive MoRI-IO's decode and prefill engines of one release through preemptions, and requests that no router sent.

Run with the release's sources and the stand-in for mori, and the bundle or not, on the path; arguments are names of cases. Both engines' schedulers, connectors and workers are the release's own; the model is the double of
moriio_reads, which samples WRONG where a slot before its own does not hold what the request's tokens say. Prints as JSON
what the clients of each case got, by scheduler and mode.
"""

from __future__ import annotations

from result import begin_driver, leave, print_result, raised

begin_driver()

import functools
import gc
import importlib.util
import itertools
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import moriio_engines
import moriio_worker
import real_scheduler as engine
import vllm
from moriio_engines import ROLES
from moriio_reads import WRONG, Died, World, prompt, runner
from moriio_worker import HOST, common, until

SECONDS = 5.0
"""Longest time for what nothing is in the way of; a transfer takes a few milliseconds."""
ROUNDS = 60
"""Steps without any progress after which a request counts as one that waits for ever."""
KV_FIRST = importlib.util.find_spec(f"{common.__package__}.moriio_layout") is None
"""Whether keys and values are a cache's first dimension, as to 0.23.0; later its blocks are."""
CLIENTS_ID = "\u65e5".encode().decode("latin-1")
"""Of a client that sends `X-Request-Id` in UTF-8, as the API server reads it: one of its characters cannot be printed."""
FOREIGN = 77.0
"""What another request would have left in a block."""


class Engine(World):
    """One engine, its scheduler included; prefill or decode."""

    def __init__(self, scheduler: str, model: Any, *, write: bool, prefill: bool = False, blocks: int = 8) -> None:
        self.role = common.ROLE.PRODUCER if prefill else common.ROLE.CONSUMER
        self.acts()
        super().__init__(scheduler, "fail", model, blocks, prefill, write)
        self.listens()
        self.finished: dict[str, Any] = {}
        """What the router gets of a request that has ended."""

    def acts(self) -> None:
        """What this thread does now, it does as this engine."""
        ROLES[threading.current_thread()] = self.role
        runner.get_kv_transfer_group = lambda: self.connector

    def listens(self) -> None:
        """What hears of this engine's peer, from its first step on to 0.23.0, is part of this engine."""
        ROLES[self.connector.connector_worker.moriio_wrapper.notify_thread] = self.role

    def empty_caches(self, spec: Any) -> dict[str, Any]:
        return moriio_worker.caches(0.0) if KV_FIRST else moriio_engines.caches(spec, 0.0)

    def slot(self, cache: Any, block: int, at: int) -> Any:
        return cache[:, block, at] if KV_FIRST else cache[block, :, at]

    def step(self) -> None:
        self.acts()
        try:
            super().step()
        finally:
            self.listens()

    def finish_step(self) -> None:
        scheduled, output = self.queue.popleft()
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for part in outputs.outputs:
                self.tokens[part.request_id] += part.new_token_ids
                if part.kv_transfer_params:
                    self.finished[part.request_id] = part.kv_transfer_params
                if part.finish_reason is not None:
                    self.ends[part.request_id] = str(part.finish_reason)

    def run(self, names: Iterable[str]) -> None:
        """Step until these requests have ended, or nothing has moved for a while."""
        wanted, still, seen = set(names), 0, 0
        pause = threading.Event()
        while not wanted <= set(self.ends) and still < ROUNDS:
            self.step()
            moved = sum(map(len, self.tokens.values()))
            still, seen = (0, moved) if moved > seen else (still + 1, seen)
            pause.wait(0.002)

    def preempt_all(self) -> None:
        """Preempt every running request by `reset_prefix_cache`; others' KV is in the blocks then."""
        while self.queue:
            self.finish_step()
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.soil()

    def soil(self) -> None:
        for cache in self.caches.values():
            cache.fill_(FOREIGN)


class Two:
    """A prefill engine and a decode engine of one mode."""

    _numbers = itertools.count(1)

    def __init__(self, scheduler: str, model: Any, write: bool) -> None:
        self.write = write
        self.make: Callable[..., Engine] = lambda **options: Engine(scheduler, model, write=write, **options)
        self.decode = self.make()
        self._prefill: Engine | None = None

    @property
    def prefill(self) -> Engine:
        if self._prefill is None:
            self._prefill = self.make(prefill=True)
        return self._prefill

    def named(self) -> str:
        """An id as the router makes it, with the addresses of both engines."""
        addresses = [
            f"host:{HOST},handshake:{one.handshake_port},notify:{one.notify_port}"
            for one in (self.prefill, self.decode)
        ]
        return f"cmpl-___prefill_addr_{addresses[0]}___decode_addr_{addresses[1]}_{next(self._numbers):032x}-0"

    def parameters(self, peer: Engine, **what: Any) -> dict[str, Any]:
        """Transfer parameters as the router sends them where it sends both requests at once."""
        return {
            "do_remote_decode": False,
            "do_remote_prefill": False,
            "transfer_id": f"tx-{CLIENTS_ID}-{next(self._numbers)}",
            "remote_block_ids": None,
            "remote_engine_id": None,
            "remote_host": HOST,
            "remote_port": peer.handshake_port,  # read to 0.19.1
            "remote_handshake_port": peer.handshake_port,
            "remote_notify_port": peer.notify_port,
            "remote_dp_size": 1,
            "remote_dp_rank": 0,
            "tp_size": 1,
            **what,
        }

    def add(self, tokens: list[int], number: int) -> str:
        """A request that prefill computes and decode goes on with; the name that it has in the decode engine."""
        named = self.named()
        at_prefill = self.parameters(self.decode, do_remote_decode=True)
        if self.write:
            at_decode = self.parameters(self.prefill, do_remote_prefill=True, transfer_id=at_prefill["transfer_id"])
            self.decode.submit(f"{named}-d", tokens, at_decode, number)
            self.prefill.submit(f"{named}-p", tokens, at_prefill, 1)
        else:
            self.prefill.submit(f"{named}-p", tokens, at_prefill, 1)
            self.prefill.run([f"{named}-p"])
            found = self.prefill.finished[f"{named}-p"]
            given = {"transfer_id": at_prefill["transfer_id"], "remote_port": self.prefill.handshake_port, **found}
            for port in ("remote_handshake_port", "remote_notify_port"):  # to 0.19.1 the router adds them
                given.setdefault(port, self.parameters(self.prefill)[port])
            self.decode.submit(f"{named}-d", tokens, given, number)
        return f"{named}-d"

    def begun(self, name: str, tokens: int = 1) -> None:
        """Step both engines until a client of the decode engine has got so many tokens."""

        def got() -> bool:
            self.decode.step()
            if self.write:
                self.prefill.step()
            return len(self.decode.tokens[name]) >= tokens or name in self.decode.ends

        until(got, SECONDS)

    def ended(self, *names: str) -> str:
        """What clients of the decode engine got, and what stays behind in the two engines."""
        self.decode.run(names)
        engines = [one for one in (self.decode, self._prefill) if one is not None]
        for name in names:
            if name not in self.decode.ends:
                self.decode.abort(name)
                self.decode.ends[name] = "waits"
        if not until(lambda: not sum(one.kept() for one in engines), 1.0):
            return ", ".join(self.decode.outcome(name) for name in names) + "; blocks are kept"
        return ", ".join(self.decode.outcome(name) for name in names)


def healthy(two: Two) -> str:
    """Prompts that end within a block, at its end and one after it; the second one twice."""
    again = prompt(8)
    seen = []
    for tokens in (prompt(7), again, prompt(9), again):
        name = two.add(tokens, 3)
        two.begun(name)
        seen.append(two.ended(name))
    return ", ".join(dict.fromkeys(seen))


def reset(two: Two) -> str:
    """Preempted by a reset of the prefix cache after its first token, again after its third."""
    name = two.add(prompt(11), 6)
    for tokens in (1, 3):
        two.begun(name, tokens)
        if WRONG in two.decode.tokens[name] or name in two.decode.ends:
            break
        two.decode.preempt_all()
    return two.ended(name)


def full_pool(two: Two) -> str:
    """Two requests that fill the pool: one is preempted for the other, and finds part of its KV still there."""
    met = two.add(prompt(7), 1)  # some releases lose one of two reads of a step that meets their peer
    two.begun(met)
    two.ended(met)
    first, second = two.add(prompt(11), 13), two.add(prompt(11), 13)
    for name in (first, second):
        two.begun(name)
    return two.ended(first, second)


def prompt_is_cached(two: Two) -> str:
    """A request that was preempted finds the KV of its whole prompt still there."""
    name = two.add(prompt(8), 8)
    two.begun(name, 3)
    while two.decode.queue:
        two.decode.finish_step()
    request = two.decode.scheduler.requests[name]
    two.decode.scheduler.running.remove(request)
    two.decode.scheduler._preempt_request(request, 0.0)
    two.decode.scheduler.prev_step_scheduled_req_ids.clear()  # as a reset does: it is scheduled again at once
    return two.ended(name)


def preempted_and_gone(two: Two) -> str:
    """The client of a preempted request goes; another one is served."""
    gone = two.add(prompt(11), 6)
    two.begun(gone)
    two.decode.preempt_all()
    two.decode.abort(gone)
    two.decode.step()
    name = two.add(prompt(11), 3)
    two.begun(name)
    return two.ended(name)


def local(two: Two) -> str:
    """A request that no router sent, at the decode engine."""
    two.decode.soil()
    return two.ended(two.decode.submit("cmpl-local", prompt(11), None, 3))


def anothers(two: Two) -> str:
    """Parameters that are another connector's."""
    two.decode.soil()
    return two.ended(two.decode.submit("cmpl-local", prompt(11), {"lmcache.skip_save": True}, 3))


def odd_cases(two: Two) -> dict[str, tuple[str, Any]]:
    """By what is odd about it: the request's id, and its parameters; all at the decode engine."""
    plain = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "tx-odd"}
    whole = two.parameters(two.prefill, do_remote_prefill=True, remote_block_ids=blocks_named(3), remote_engine_id="p")
    cases: dict[str, tuple[str, Any]] = {
        "alone": ("cmpl-1", {"do_remote_prefill": True}),
        "no address": ("cmpl-2", {**plain, "remote_block_ids": blocks_named(3), "remote_engine_id": "p"}),
        "both": (two.named(), {**whole, "do_remote_decode": True}),
        "to another": (two.named(), {**whole, "do_remote_prefill": False, "do_remote_decode": True}),
        "malformed id": (f"cmpl-___prefill_addr_x___decode_addr_x_{1:032x}", {**whole, "remote_host": None}),
        "a list": ("cmpl-3", ["do_remote_prefill"]),
    }
    odd: dict[str, tuple[Any, ...]] = {
        "transfer_id": (None, "", 7, ["a"], {}, "x" * 5000),
        "remote_dp_rank": (None, "0", -1, 1 << 40, True),
        "tp_size": ("many", -1, [1]),  # a large one has stock take all memory
        "remote_dp_size": ("many", -1, [1]),
    }
    if not two.write:
        odd["remote_block_ids"] = ([], [[]], "123", {"0": 1}, [-1], ["1"], [[1 << 40]], [None], blocks_named(1))
        odd["remote_engine_id"] = (None, "", 7, ["a"])
    for field, values in odd.items():
        for number, value in enumerate(values):
            cases[f"{field}: {number}"] = (two.named(), {**whole, field: value})
    for field, values in {
        "remote_host": (None, "", 7, "a b", "x/y", ["h"]),
        "remote_notify_port": (None, "", 0, -1, 1 << 20, "x", [1]),
    }.items():
        for number, value in enumerate(values):
            cases[f"{field}: {number}"] = (f"cmpl-{field}-{number}", {**whole, field: value})
    return cases


def blocks_named(number: int) -> Any:
    """Blocks of a prefill engine, as the release names them."""
    numbers = list(range(1, number + 1))
    return [numbers] if grouped() else numbers


def grouped() -> bool:
    return hasattr(moriio_engines.connector.MoRIIOConnector, "request_finished_all_groups")


def odd(two: Two) -> dict[str, str]:
    """What came of each odd request, on a decode engine of its own, where it is not what its prompt says."""
    found = {}
    for case, (name, parameters) in odd_cases(two).items():
        two.decode = two.make()
        two.decode.soil()
        outcome = attempt(lambda name=name, parameters=parameters: two.ended(submit(two.decode, name, parameters)))
        gone = two.make()
        gone.acts()
        left = attempt(lambda gone=gone, name=name, parameters=parameters: leaves(gone, name, parameters))
        if (outcome, left) != ("right", "right"):
            found[case] = f"{outcome}; gone at once: {left}"
    return found


def submit(one: Engine, name: str, parameters: Any) -> str:
    return one.submit(name, prompt(11), parameters, 3)


def leaves(one: Engine, name: str, parameters: Any) -> str:
    """A client goes before its request was scheduled; another one is served, and nothing is kept."""
    one.abort(submit(one, name, parameters))
    one.step()
    return "right" if not one.kept() else "blocks are kept"


def at_prefill(two: Two) -> dict[str, str]:
    """The same at the prefill engine, of requests that it is to keep for another engine, or that no router sent."""
    whole = two.parameters(two.decode, do_remote_decode=True)
    cases: dict[str, Any] = {
        "none": None,
        "another's": {"lmcache.skip_save": True},
        "alone": {"do_remote_decode": True},
        "to load": {**whole, "do_remote_decode": False, "do_remote_prefill": True},
        **{
            f"transfer_id: {number}": {**whole, "transfer_id": value}
            for number, value in enumerate((None, 7, ["a"], ""))
        },
    }
    found = {}
    for case, parameters in cases.items():
        one = two.make(prefill=True)
        outcome = attempt(lambda one=one, parameters=parameters: computes(one, parameters))
        if outcome != "right":
            found[case] = outcome
    return found


def computes(one: Engine, parameters: Any) -> str:
    """A prompt, and more tokens than fit into its last block, by one engine alone."""
    name = one.submit("cmpl-p", prompt(11), parameters, 6)
    one.run([name])
    kept = one.kept()
    return one.outcome(name) + ("; blocks are kept" if kept else "")


CASES: dict[str, Callable[[Two], Any]] = {
    case.__name__: case
    for case in (healthy, reset, full_pool, prompt_is_cached, preempted_and_gone, local, anothers, odd, at_prefill)
}


def attempt(case: Callable[[], Any]) -> Any:
    try:
        return case()
    except Died as error:
        print(f"  {error}", file=sys.stderr)
        return f"engine dies: {str(error).partition(':')[0]}"
    except Exception as error:
        return raised(error)


def played(model: Any, scheduler: str, mode: str, names: Iterable[str] = CASES) -> dict[str, Callable[[], Any]]:
    """The cases by their names, each with engines of its own of this scheduler and mode: what came of it."""
    make = functools.partial(Two, scheduler, model, mode == "write")
    return {name: functools.partial(attempt, functools.partial(_play, CASES[name], make)) for name in names}


def _play(case: Callable[[Two], Any], make: Callable[[], Two]) -> Any:
    return case(make())


def begin() -> None:
    """Tell the release's modules of this machine."""
    engine.quiet()
    moriio_engines.set_up()
    gc.enable()


def main() -> None:
    begin()
    outcomes: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = engine.make_model_config(Path(directory))
        for scheduler, mode in itertools.product(engine.SCHEDULERS, ("read", "write")):
            found = outcomes.setdefault(f"{scheduler}, {mode}", {})
            for name, case in played(model, scheduler, mode, sys.argv[1:] or CASES).items():
                found[name] = case()
                print(f"{scheduler}, {mode}, {name}: {found[name]}", file=sys.stderr)
    print_result({"cases": outcomes}, vllm)
    leave()


if __name__ == "__main__":
    main()
