"""A read of another worker's blocks has ended when, after its bytes, the word has come that they were under a lease.

All of it happens in NIXL's agent, whose methods the worker calls in the same way in every release: the worker asks for
the state of its read, and hears PROC until both parts have ended, then DONE or ERR. What follows a read that failed is
the release's own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import lease_table

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]


class Reading:
    """Whose blocks the worker is about to read: both sides' ids of the request, and what a failure takes."""

    __slots__ = ("failed", "reader", "request_id")

    def __init__(self, request_id: str, reader: str, failed: Callable[[], None]) -> None:
        self.request_id = request_id
        self.reader = reader
        self.failed = failed


class _Read:
    """A transfer that reads blocks: of whom, what is to be sent when it was right, and the read of the table."""

    __slots__ = ("agent_name", "answer", "check", "landing", "notification", "reading", "since")

    def __init__(self, agent_name: str, reading: Reading, notification: bytes) -> None:
        self.agent_name = agent_name
        self.reading = reading
        self.notification = notification
        self.since: float | None = None  # when the bytes had come, by time.monotonic()
        self.check: Any = None
        self.landing: int | None = None
        self.answer = "PROC"


class Guard:
    """What is known of one agent: its worker's lease table, the tables of others, and its reads under way.

    Each method takes the class's own method, unbound, and stands in for it.
    """

    __slots__ = ("_left", "_livepatch", "_peers", "_readers", "_reads", "_sides", "reading", "table")

    def __init__(self, livepatch: PatchContext, table: lease_table.LeaseTable) -> None:
        self._livepatch = livepatch
        self.table = table
        self.reading: Reading | None = None
        self._peers: dict[str, int] = {}  # agents whose tables can be read, and where these are
        self._sides: dict[Any, str] = {}  # the handles of prepared descriptors of theirs
        self._reads: dict[Any, _Read] = {}  # by transfer handle
        self._readers: dict[str, dict[Any, _Read]] = {}  # the same, by the request that is loaded
        self._left: list[tuple[Any, int]] = []  # reads of tables that were given up and have not ended, with landings

    # Who can be asked

    def add_remote_agent(self, original: Call, agent: Any, *rest: Any, **named: Any) -> Any:
        name = original(agent, *rest, **named)
        address = lease_table.table_at(name)
        if address is not None:
            try:
                agent.release_xfer_handle(self._table_read(agent, name, address, 0, self.table.address))
                self._peers[name] = address
                return name
            except Exception as error:  # its memory could not be registered there, or does not suit a backend here
                self._livepatch.say("unreadable", f"the leases of {name} cannot be read: {error}")
        self._livepatch.count("peer_unguarded")
        self._livepatch.say(
            "peer_unguarded",
            f"agent {name} does not say which leases it holds (is the bundle there?): what is read from it after its "
            "lease has ended is not noticed, as without this patch",
        )
        return name

    def remove_remote_agent(self, original: Call, agent: Any, name: str) -> Any:
        self._peers.pop(name, None)
        return original(agent, name)

    def prep_xfer_dlist(self, original: Call, agent: Any, agent_name: str, *rest: Any, **named: Any) -> Any:
        handle = original(agent, agent_name, *rest, **named)
        if agent_name in self._peers:
            self._sides[handle] = agent_name
        return handle

    def release_dlist_handle(self, original: Call, agent: Any, handle: Any) -> Any:
        self._sides.pop(handle, None)
        return original(agent, handle)

    # Reads

    def make_prepped_xfer(
        self,
        original: Call,
        agent: Any,
        operation: str,
        local_xfer_side: Any,
        local_indices: Any,
        remote_xfer_side: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """A read of blocks does not notify the other side of its end: that is sent when it was right."""
        asked = (agent, operation, local_xfer_side, local_indices, remote_xfer_side)
        name = None
        if self.reading is not None and operation == "READ":
            name = self._sides.get(remote_xfer_side)
        if self.reading is None or name is None:
            return original(*asked, *rest, **named)
        notification = named.pop("notif_msg", b"")
        handle = original(*asked, *rest, **named)
        read = self._reads[handle] = _Read(name, self.reading, notification)
        self._readers.setdefault(self.reading.reader, {})[handle] = read
        return handle

    def check_xfer_state(self, original: Call, agent: Any, handle: Any) -> Any:
        read = self._reads.get(handle)
        if read is None:
            return original(agent, handle)
        if read.answer == "PROC" and read.since is None:
            try:
                answer = original(agent, handle)
            except Exception:
                self._fail(read)
                if self._is_early(read):
                    return "PROC"
                raise
            if answer == "DONE":
                read.since = time.monotonic()
            elif answer != "PROC":
                self._fail(read)
        if read.answer == "PROC" and read.since is not None:
            try:
                read.answer = self._answer(original, agent, read, read.since)
            except Exception as error:  # what is not known to be right is not passed on, whatever went wrong
                self._livepatch.stand_aside("judging a read", error)
                read.answer = "ERR"
        return "PROC" if read.answer == "ERR" and self._is_early(read) else read.answer

    def _fail(self, read: _Read) -> None:
        """NIXL says that the read has failed."""
        read.answer = "ERR"
        read.reading.failed()

    def _is_early(self, failed: _Read) -> bool:
        """Whether a failure cannot be reported yet: another read of the same request goes on.

        From 0.22.1 to 0.29.0 the first failure is the request's end: its blocks are given to others, which a read from
        another rank would still write, and the end of that one is an error. So the failures of one request are reported
        in one round of the worker's, which asks in the order in which the reads were begun.
        """
        reads = list(self._readers[failed.reading.reader].values())
        return reads[0] is not failed or any(read.answer == "PROC" for read in reads)

    def release_xfer_handle(self, original: Call, agent: Any, handle: Any) -> Any:
        read = self._reads.pop(handle, None)
        if read is not None:
            of_request = self._readers[read.reading.reader]
            del of_request[handle]
            if not of_request:
                del self._readers[read.reading.reader]
        if read is not None and read.landing is not None:
            self._left.append((read.check, read.landing))
            self._take_back(functools.partial(original, agent))
        return original(agent, handle)

    def _answer(self, state_of: Call, agent: Any, read: _Read, since: float) -> str:
        """DONE where the lease is held now, so was while the bytes came; ERR where that cannot be shown."""
        say, limit = self._livepatch.say, self._livepatch.options["CHECK_SECONDS"]
        request_id = read.reading.request_id
        kind, why = "lease_unknown", f"prefill's lease table could not be read within {limit:g} s"
        try:
            state = self._state(state_of, agent, read)
            if state == "PROC" and time.monotonic() - since < limit:
                return "PROC"
            if state == "DONE" and read.landing is not None:
                bucket = self.table.landed(read.landing)
                if bucket == lease_table.ASIDE:
                    self._livepatch.count("prefill_aside")
                    say("prefill_aside", f"agent {read.agent_name} does not say which leases it holds: not checked")
                    return self._right(agent, read)
                if lease_table.held(bucket, request_id):
                    self._livepatch.count("lease_held")
                    return self._right(agent, read)
                kind, why = "lease_lost", "prefill's lease had ended before the read did"
            elif state != "PROC":
                why = "reading prefill's lease table failed"
        except Exception as error:
            why = f"reading prefill's lease table failed: {error}"
        self._livepatch.count(kind)
        say(kind, f"what was read of prefill's request {request_id} counts as a failed load: {why}")
        read.reading.failed()
        return "ERR"

    def _right(self, agent: Any, read: _Read) -> str:
        if read.notification:
            try:
                agent.send_notif(read.agent_name, notif_msg=read.notification)
            except Exception as error:
                self._livepatch.say(
                    "not_notified", f"prefill cannot be told, and keeps its blocks until the lease ends: {error}"
                )
        return "DONE"

    def _state(self, state_of: Call, agent: Any, read: _Read) -> Any:
        """The state of the read of the table, which begins when a landing is free."""
        if read.check is not None:
            return state_of(agent, read.check)
        if not self.table.free_landings:
            self._take_back(agent.release_xfer_handle)
        if not self.table.free_landings:
            return "PROC"
        number = self.table.free_landings.pop()
        try:
            read.check = self._table_read(
                agent,
                read.agent_name,
                self._peers[read.agent_name],
                lease_table.bucket_of(read.reading.request_id),
                self.table.landing(number),
            )
        except BaseException:
            self.table.free_landings.append(number)
            raise
        read.landing = number
        return agent.transfer(read.check)

    def _table_read(self, agent: Any, name: str, address: int, bucket: int, landing: int) -> Any:
        """A transfer, not begun, of one bucket of another's table."""
        here = agent.get_xfer_descs([(landing, lease_table.BUCKET, 0)], "DRAM")
        there = agent.get_xfer_descs([(address + bucket * lease_table.BUCKET, lease_table.BUCKET, 0)], "DRAM")
        return agent.initialize_xfer("READ", here, there, name)

    def _take_back(self, release: Call) -> None:
        """Release the reads of tables that have ended: NIXL refuses while one may still write to its landing."""
        left, self._left = self._left, []
        for check, number in left:
            try:
                release(check)
            except Exception:
                self._left.append((check, number))
            else:
                self.table.free_landings.append(number)
