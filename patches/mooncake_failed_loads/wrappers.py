"""Each failed load is reported to decode's scheduler, once nothing can write into its blocks any more.

To 0.29.0 the worker logs what a prefill engine, or the way to it, refused, and the request waits for ever. In every
release it waits for a prefill engine that is gone as long as for one that is slow.

No sign that decode gets over the network shows that prefill's process has ended: a firewall may refuse new connections,
and end the one that stands, while RDMA goes on. So blocks for which a request has left are free again with prefill's
last answer; without it never sooner than the original frees them, which to 0.29.0 is never.

Source: vllm PR#50984 (0.30.0), which tells the scheduler of what was refused.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .asks import ASKED, LOAD, Asked, Decoder, Load, blocks_of, emptied, writes_no_more
from .held import HOLDS, LOADS, Holds, carry
from .lines import Line, Lines, Ports
from .lost import prepare, report, told_by

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
WORKER = f"{MODULE}:MooncakeConnectorWorker"
CONNECTOR = f"{MODULE}:MooncakeConnector"

RELEASES_REPORT = "_livepatch_releases_report"
"""Attribute of a worker from 0.30.0 on: the release's own `_handle_failed_recv`."""

UNCERTAIN = "Mooncake transfer engine returned"
"""What an answer says after a write that failed, from 0.19.1 on behind what it says of other requests: others of the
batch may still be under way (Mooncake's MultiTransport::getBatchTransferStatus answers FAILED at the first that did).
"""

FEWER = "P num blocks less than D"
"""The answer to 0.18.1 that comes before the writes of the other requests of the same ask, and before their answer."""


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """At each target: a wrapper, or a look at its calls."""
    seconds: float = livepatch.options["LOOK_SECONDS"]
    share: float = livepatch.options["HELD_SHARE"]
    ports = Ports(seconds)
    late: set[int] = set()  # transfer requests that are listened for beyond the original's time
    together = not livepatch.facts.get("settles_each_ask")  # 0.30.0 to 0.32.0 do not wait for all of prefill's workers

    def reports(worker: Any) -> bool:
        """From 0.30.0 on the original reports loads that failed."""
        return hasattr(worker, "_handle_failed_recv")

    # What is done with a load that failed

    def ended(worker: Any, pull: Any, well: bool) -> None:
        """One worker of prefill's writes no more for this pull. With the last of them a failed load is reported."""
        if writes_no_more(pull, well):
            report(livepatch, worker, pull)

    def lost(worker: Any, asked: Asked, reason: str) -> None:
        """An ask has ended: nobody writes for it any more. What it has not brought is lost."""
        names, asked.open = asked.open, set()
        if not reports(worker):
            for name in names:
                ended(worker, asked[name], well=False)
            return
        if together and RELEASES_REPORT in vars(worker):
            names = {name for name in names if writes_no_more(asked[name], well=False)}
        names = {name for name in names if name in asked and blocks_of(asked[name])}
        if names:
            livepatch.count("failed", sum(not asked[name].failed for name in names))
            vars(worker).get(RELEASES_REPORT, worker._handle_failed_recv)(asked, names, reason)

    # What may still be written

    def hold(worker: Any, asked: Asked, names: Iterable[str]) -> None:
        """From 0.30.0 on these are reported as failed, and their blocks are nobody's. Before, they wait."""
        new = {name: blocks_of(asked[name]) for name in names if name in asked and name not in asked.held}
        new = {name: blocks for name, blocks in new.items() if blocks}
        if not new:
            return
        holds: Holds | None = vars(worker).get(HOLDS)
        for name, blocks in new.items():
            pull = asked[name]
            asked.held[name] = holds.hold(pull.remote_engine_id, pull.d_req_id, blocks) if holds is not None else ""
        number = holds.blocks if holds is not None else sum(map(len, new.values()))
        why = f"a prefill engine may still write for loads that failed: {number} blocks are held"
        livepatch.tell("held", why, len(new))

    def let_go(worker: Any, asked: Asked, names: Iterable[str]) -> None:
        """Nothing is written any more for these."""
        keys = [asked.held.pop(name) for name in names if name in asked.held]
        holds: Holds | None = vars(worker).get(HOLDS)
        if keys and holds is not None:
            for key in keys:
                holds.let_go(key)
            livepatch.count("given_back", len(keys))

    def overdue(worker: Any) -> bool:
        """An answer did not come in the release's time: whether it is waited for beyond that."""
        asked = ASKED.get()
        if asked is None or livepatch.aside or not any(map(blocks_of, asked.values())):
            return False
        try:
            hold(worker, asked, asked.open)
            if HOLDS in vars(worker):
                lost(worker, asked, "no answer in time")
            elif len(late) >= LOADS:
                return False  # each takes a socket that other transfer requests need
        except Exception as error:
            livepatch.stand_aside("an answer that did not come in time", error)
            return False
        late.add(id(asked))
        return True

    def opened(worker: Any, made: Any) -> None:
        """The original made a socket: of a transfer request, its connection is watched as long as blocks are held."""
        asked = ASKED.get()
        if asked is None:
            return
        asked.line, asked.unwatched = None, True
        if livepatch.aside:
            return
        try:
            asked.line = Line(made, lambda: overdue(worker), lambda: bool(asked.held) and HOLDS in vars(worker))
            asked.unwatched = False
        except Exception as error:
            livepatch.stand_aside("a socket for a transfer request", error)

    # Answers

    def answered(worker: Any, asked: Asked, response: Any) -> None:
        """To 0.29.0: count what is answered, and let the release count each load that went well, once."""
        status = response.status.name
        asked.over = status in ("ERROR", "FINISH")
        failed = asked.open & set(response.err_reqs or ())
        asked.open -= failed
        if UNCERTAIN in (response.err_msg or ""):
            hold(worker, asked, failed)
        else:
            let_go(worker, asked, failed)
            for name in failed:
                ended(worker, asked[name], well=False)
        well = [name for name in response.ok_reqs or () if name in asked.open]
        asked.open.difference_update(well)
        let_go(worker, asked, {*well, *(asked.open if asked.over else ())})
        response.ok_reqs = well
        for name in well:
            ended(worker, asked[name], well=True)
        if livepatch.facts.get("answers_twice") and response.err_msg == FEWER and asked.open:
            response.status = type(response.status).CONTINUE
            asked.over = False

    def seen(worker: Any, asked: Asked, response: Any) -> None:
        """From 0.30.0 the release reports what has failed."""
        asked.over = response.status.name in ("ERROR", "FINISH")
        if response.status.name == "LAYOUT_MISS":
            asked.line, asked.unwatched = None, False
        if UNCERTAIN in (response.err_msg or ""):
            asked.broken |= {*(response.err_reqs or ())}
            hold(worker, asked, asked.broken)
        named = {*(response.ok_reqs or ()), *(response.err_reqs or ())}
        asked.named |= named
        let_go(worker, asked, (set(asked.held) if asked.over else named) - asked.broken)
        if not together:
            asked.open -= named
            return
        for name in asked.open.intersection(response.ok_reqs or ()):
            asked.open.remove(name)
            if writes_no_more(asked[name], well=True):
                vars(worker)[RELEASES_REPORT](asked, [name], "another worker of the prefill engine has refused it")

    def reporting(original: Call, worker: Any, pull_metas: Any, req_ids: Any, *rest: Any, **named: Any) -> Any:
        """From 0.30.0 on the release reports as failed also what has no answer.

        0.30.0 to 0.32.0 report a load with the first of prefill's workers that fails, whoever else still writes.
        """
        asked, names = pull_metas, req_ids
        if isinstance(asked, Asked) and asked.sent and not asked.over:
            hold(worker, asked, asked.open.intersection(names) - asked.named)
        if isinstance(asked, Asked) and together:  # else nobody was asked
            failed = asked.open.intersection(names)
            asked.open -= failed
            names = [name for name in names if name in failed and writes_no_more(asked[name], well=False)]
            if len(names) < len(failed):
                livepatch.count("held", len(failed) - len(names))
        return original(asked, names, *rest, **named)

    def listen(worker: Any) -> None:
        if isinstance(worker._xfer_resp_decoder, Decoder):
            return
        read = seen if reports(worker) else answered
        if reports(worker):
            vars(worker)[RELEASES_REPORT] = worker._handle_failed_recv
            livepatch.around_its(worker, "_handle_failed_recv", reporting)
        worker.async_zmq_ctx = Lines(worker.async_zmq_ctx, lambda made: opened(worker, made))
        own = worker._xfer_resp_decoder

        def guarded(asked: Asked, response: Any) -> None:
            try:
                read(worker, asked, response)
            except Exception as error:
                livepatch.stand_aside("reading an answer", error)

        worker._xfer_resp_decoder = Decoder(own, guarded)

    # The ask

    async def watched(original: Call, worker: Any, address: str, asked: Asked, *rest: Any, **named: Any) -> None:
        """Ask as the release does, and see to it that what is asked comes to an end."""
        for pull in asked.values():
            load: Load = getattr(pull, LOAD)
            if load.counts_asks:
                load.left += 1
        ASKED.set(asked)
        release = asyncio.ensure_future(original(address, asked, *rest, **named))
        try:
            await followed(release, worker, address, asked)
        except sys.modules["zmq"].ContextTerminated:
            await cancelled(release)  # the worker is shut down, which waits for its sockets to be closed
        except Exception as error:
            livepatch.stand_aside("following an ask", error)
            await release
        finally:
            late.discard(id(asked))
            if asked.line is not None:
                asked.line.end()

    async def cancelled(release: asyncio.Future[Any]) -> None:
        release.cancel()
        await asyncio.gather(release, return_exceptions=True)

    async def followed(release: asyncio.Future[Any], worker: Any, address: str, asked: Asked) -> None:
        holds: Holds | None = vars(worker).get(HOLDS)
        while not release.done():
            await asyncio.wait([release], timeout=seconds)
            if release.done():
                break
            if not asked.sent:
                if await ports.refuses(address) and not (asked.sent or release.done()):
                    livepatch.count("refused")
                    forget(worker, address, asked)
                    await cancelled(release)
                    break
            elif closed(worker, address, asked):
                # An answer goes to the connection that the request came by: none comes any more.
                hold(worker, asked, asked.open)
                if holds is not None:
                    lost(worker, asked, f"{address} has closed the connection")
                if not asked.held or not reports(worker):
                    await cancelled(release)
                    break
            if holds is not None and asked.held and time_is_over(worker, asked):
                await cancelled(release)
                break
        if asked.over:
            lost(worker, asked, "the prefill engine has answered, without it")
        elif asked.open and asked.sent and not reports(worker):
            hold(worker, asked, asked.open)
        if not asked.held:
            lost(worker, asked, "the prefill engine did not answer")
        elif holds is not None:
            while not time_is_over(worker, asked):
                await asyncio.sleep(seconds)
                closed(worker, address, asked)
            let_go(worker, asked, set(asked.held))

    def closed(worker: Any, address: str, asked: Asked) -> bool:
        """Whether the other end has closed the connection by which the request left, and accepts no new one."""
        if asked.line is None or not asked.line.is_closed():
            return False
        if not asked.closed:
            asked.closed = True
            forget(worker, address, asked)
            livepatch.count("closed")
        return True

    def time_is_over(worker: Any, asked: Asked) -> bool:
        """From 0.30.0 on: whether what is held for a request that has no last answer is freed.

        Never sooner than the original frees it: where the connection was closed, and no new one accepted, for as long
        as the original waits (prefill's own wait ends before); or, whatever is seen, what is beyond HELD_SHARE.
        """
        line = asked.line
        if line is None:
            return False
        if line.closed_for() >= line.lease:
            return True
        if time.monotonic() - line.heard < line.lease or not vars(worker)[HOLDS].too_many(room(worker)):
            return False
        livepatch.tell(
            "over_share",
            "more than HELD_SHARE is held: blocks are freed when vLLM would have freed them",
            len(asked.held),
        )
        return True

    def forget(worker: Any, address: str, asked: Asked) -> None:
        """Ask the bootstrap server anew when the next request comes: an engine that is back has another address."""
        for engine in asked.engines:
            known = worker._remote_agents.get(engine, {})
            if any(address in stages.values() for stages in known.values()):
                del worker._remote_agents[engine]

    def receive_kv_from_single_worker(
        original: Call, worker: Any, worker_addr: str, pull_metas: Mapping[str, Any], *rest: Any, **named: Any
    ) -> Any:
        if not all(hasattr(pull, LOAD) for pull in pull_metas.values()):
            return original(worker_addr, pull_metas, *rest, **named)  # begun before this patch was there
        listen(worker)
        return watched(original, worker, worker_addr, Asked(pull_metas), *rest, **named)

    def receive_kv(
        original: Call, worker: Any, remote_engine_id: str, pull_metas: Mapping[str, Any], *rest: Any, **named: Any
    ) -> Any:
        engine, pulls = remote_engine_id, pull_metas
        prepare(worker)
        if too_many_of(worker, engine):
            full = {name: pull for name, pull in pulls.items() if blocks_of(pull)}
            livepatch.tell(
                "not_asked", f"so many blocks are held for loads from {engine} that none is begun", len(full)
            )
            refuse(worker, full, "too many blocks are held for loads that failed")
            # As the release asks for a request that was aborted: prefill gives its blocks back. Who lets go speaks for
            # all of decode's workers, of which others may load.
            let_go = {name: emptied(pull) for name, pull in full.items()} if works_alone(worker) else {}
            pulls = {**{name: pull for name, pull in pulls.items() if name not in full}, **let_go}
            if not pulls:
                return
        try:
            original(engine, pulls, *rest, **named)
        except Exception as error:  # as where not all of its workers are known: they register one by one
            refuse_rest(worker, pulls, f"the prefill engine cannot be asked: {type(error).__name__}: {error}")
            worker._remote_agents.pop(engine, None)  # ask who it is anew
            return
        for pull in pulls.values():
            setattr(pull, LOAD, Load(pull.pull_tasks_count))

    def works_alone(worker: Any) -> bool:
        return bool(worker.tp_size == 1 == getattr(worker, "pp_size", 1))

    def room(worker: Any) -> float:
        """How many blocks may be held."""
        return float(share * worker.kv_cache_config.num_blocks)

    def too_many_of(worker: Any, engine: str) -> bool:
        """Whether more is held than may be, and more than its part for loads from this engine."""
        holds: Holds | None = vars(worker).get(HOLDS)
        return holds is not None and holds.too_many_of(engine, room(worker))

    async def reached(
        original: Call, worker: Any, engine: str, pulls: Mapping[str, Any], *rest: Any, **named: Any
    ) -> None:
        await original(engine, pulls, *rest, **named)
        if engine not in worker._remote_agents and not reports(worker):
            refuse(worker, pulls, "its bootstrap server does not know the prefill engine")

    def refuse(worker: Any, pulls: Mapping[str, Any], reason: str) -> None:
        """Nobody was asked for these."""
        for pull in pulls.values():
            setattr(pull, LOAD, Load(1))
        lost(worker, Asked(pulls), reason)

    def refuse_rest(worker: Any, pulls: Mapping[str, Any], reason: str) -> None:
        """Somebody cannot be asked for these. To 0.23.0 others may be: their tasks were made before, and begin before
        what is called soon. The loads have failed, and end with the last of these asks."""
        for pull in pulls.values():
            setattr(pull, LOAD, Load(1, counts_asks=True))
        asyncio.get_running_loop().call_soon(rest_is_lost, worker, Asked(pulls), reason)

    def rest_is_lost(worker: Any, asked: Asked, reason: str) -> None:
        try:
            lost(worker, asked, reason)
        except Exception as error:
            livepatch.stand_aside("a load of which not all could be asked for", error)

    def handle_new_engine_id(
        original: Call, worker: Any, remote_engine_id: str, pull_metas: Mapping[str, Any], *rest: Any, **named: Any
    ) -> Any:
        prepare(worker)
        return reached(original, worker, remote_engine_id, pull_metas, *rest, **named)

    # The report

    def get_finished(connector: Any, *rest: Any, **named: Any) -> None:
        """To 0.29.0 the connector has the base class's answer, that no load has failed."""
        if "get_block_ids_with_load_errors" not in vars(connector) and not reports(connector.connector_worker):
            told_by(livepatch, connector)

    def made(answer: Any, connector: Any, *rest: Any, **named: Any) -> None:
        module = vars(sys.modules[type(connector.connector_worker or connector.connector_scheduler).__module__])
        if hasattr(module["MooncakeConnectorWorker"], "_handle_failed_recv"):
            carry(livepatch, connector)

    return {
        f"{CONNECTOR}.__init__": livepatch.after(made),
        f"{WORKER}.receive_kv": receive_kv,
        f"{WORKER}.receive_kv_from_single_worker": receive_kv_from_single_worker,
        f"{WORKER}.handle_new_engine_id": handle_new_engine_id,
        f"{CONNECTOR}.get_finished": livepatch.before(get_finished),
    }
