"""Let a release's real prefill scheduler and worker send KV to decode while it is computed; print what came, as JSON.

`mooncake_layerwise.py PATIENCE CASE...`: as mooncake_engines.py has it, and which of the cases to run.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import sys
import threading
from types import FunctionType
from typing import Any

import mooncake_engines as engines
import mooncake_sides as sides
from mooncake_engines import CHUNK, OLD, PATIENCE, PROMPT, SIZE, Pair, contents, expired, wait_at_most
from result import wait


def chunks(pair: Pair) -> Any:
    """Asked before prefill begins: what has come after each step, and what each write brought."""
    del pair.prefill.link.writes[:]
    places = pair.ask("chunks")
    pair.prefill.compute("chunks")
    after = []
    for _ in range(4):
        pair.prefill.step()
        assert pair.settled()
        after.append(pair.came(places))
    return after, pair.end("chunks", places), pair.prefill.link.writes[:], pair.left()


def late(pair: Pair) -> Any:
    """Asked when prefill has ended."""
    del pair.prefill.link.writes[:]
    pair.prefill.compute("late", content=1)
    for _ in range(5):
        pair.prefill.step()
    places = pair.ask("late", arrives=False)
    return pair.end("late", places, content=1), pair.prefill.link.writes[:], pair.left()


def amid(pair: Pair) -> Any:
    """Asked after two of the four steps."""
    del pair.prefill.link.writes[:]
    pair.prefill.compute("amid", content=2)
    pair.prefill.step()
    pair.prefill.step()
    places = pair.ask("amid")
    patched = hasattr(pair.prefill.worker, "_livepatch_writes")
    came = wait(lambda: pair.came(places, content=2) == 4, sides.SECONDS if patched else PATIENCE)
    outcome = pair.end("amid", places, content=2)
    writes = pair.prefill.link.writes
    return came, outcome, writes[0], sum(writes), pair.left()


def hits(pair: Pair) -> Any:
    """Prefill has four blocks of a prompt of which decode lacks the last six; another has the same, in one step."""
    del pair.prefill.link.writes[:]
    first = pair.ask("first", 5)
    pair.prefill.compute("first", 4 * SIZE + 8, content=3)
    came = [pair.end("first", first, content=3, prompt=4 * SIZE + 8)]
    one, other = pair.ask("one", 6), pair.ask("other")
    pair.prefill.compute("one", content=3)
    pair.prefill.compute("other", content=3)
    pair.prefill.step()
    assert pair.settled()
    before = [pair.came(one, content=3), pair.came(other, content=3)]
    came += [pair.end("one", one, content=3), pair.end("other", other, content=3)]
    return before, came, pair.left()


def same_step(pair: Pair) -> Any:
    """Two requests of one prompt are admitted in one step: the first computes what the second begins with."""
    one, other = pair.ask("same"), pair.ask("twin")
    pair.prefill.compute("same", content=4)
    pair.prefill.compute("twin", content=4)
    pair.prefill.step()
    assert pair.settled()
    before = [pair.came(one, content=4), pair.came(other, content=4)]
    return before, pair.end("same", one, content=4), pair.end("twin", other, content=4), pair.left()


def more(pair: Pair) -> Any:
    """Decode asks for more blocks than the prompt takes. Of another, prefill computes more than its prompt."""
    places = pair.ask("more", 9)
    pair.prefill.compute("more", content=5)
    for _ in range(6):
        pair.prefill.step()
    found = pair.outcome("more", places, PATIENCE), set(pair.decode.holds(places)) == {OLD}
    assert expired(pair, "more")
    places = pair.ask("longer")
    pair.prefill.compute("longer", PROMPT, content=6, tokens=12)
    for _ in range(20):
        pair.prefill.step()
    return found, pair.outcome("longer", places), pair.came(places, content=6, prompt=PROMPT + 11)


def aborted(pair: Pair) -> Any:
    """The prefill is aborted while an early write is under way: its blocks are nobody's, and no answer, till that ends."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("aborted")
    prefill.compute("aborted", content=7)
    begun = link.begun
    link.open.clear()
    prefill.step()
    under_way = wait(lambda: link.begun > begun, PATIENCE)
    prefill.abort("p-aborted")
    prefill.fill(8)  # more than is free
    held = prefill.taken()
    early = pair.outcome("aborted", places, PATIENCE)
    link.open.set()
    outcome = pair.outcome("aborted", places, PATIENCE * 10)
    return under_way, held, early, outcome, pair.came(places, content=7), pair.left()


def begun_again(pair: Pair) -> Any:
    """The same, and the prefill comes once more, under the same transfer: it begins at once, on other blocks."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("again")
    prefill.compute("again", content=8)
    begun = link.begun
    link.open.clear()
    prefill.step()
    under_way = wait(lambda: link.begun > begun, PATIENCE)
    prefill.abort("p-again")
    prefill.step()
    prefill.compute("again-2", content=39, transfer="again")
    stepping = threading.Thread(target=prefill.step)
    stepping.start()
    stepping.join(PATIENCE if under_way else sides.SECONDS)
    waits = stepping.is_alive()
    held = prefill.taken() - len(prefill.blocks("p-again-2"))
    link.open.set()
    stepping.join()
    outcome = pair.outcome("again", places, PATIENCE * 10 if under_way else PATIENCE)
    places = pair.ask("again-2", transfer="again")
    return under_way, waits, held, outcome, pair.end("again-2", places, content=39), pair.left()


def preempted(pair: Pair) -> Any:
    """The prefill is preempted after two steps, while an early write is under way, and computed anew."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("preempted")
    prefill.compute("preempted", content=9)
    prefill.step()
    assert pair.settled()
    begun = link.begun
    link.open.clear()
    prefill.step()
    under_way = wait(lambda: link.begun > begun, PATIENCE)
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    prefill.again = 50.0  # what is computed anew differs, to be told from what was there before
    stepping = threading.Thread(target=prefill.step)
    stepping.start()
    stepping.join(PATIENCE if under_way else sides.SECONDS)
    held = stepping.is_alive()
    link.open.set()
    stepping.join()
    del link.writes[:]
    result = pair.end("preempted", places, content=9, again=50.0)
    prefill.again = 0.0
    return under_way, held, result, link.writes[:], pair.left()


def computed_anew(pair: Pair) -> Any:
    """What was computed is not good, as after a load that failed: the scheduler goes back, and computes it anew."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("anew")
    request = prefill.compute("anew", content=10)
    prefill.step()
    prefill.step()
    assert pair.settled()
    request.num_computed_tokens = CHUNK // 2
    prefill.again = 50.0
    del link.writes[:]
    for _ in range(6):
        prefill.step()
    outcome = pair.outcome("anew", places)
    prefill.again = 0.0
    found = pair.decode.holds(places)
    # The first block was not computed anew.
    right = [contents(10, 0, SIZE), *(50.0 + contents(10, place, SIZE) for place in range(1, 7))]
    return outcome, found[:7] == right, link.writes[:], pair.left()


def drained(pair: Pair) -> Any:
    """An early write is under way when prefill ends: the answer waits for it, and it is not sent again."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("drained")
    prefill.compute("drained", content=11)
    del link.writes[:]
    link.open.clear()
    prefill.step()
    wait(lambda: bool(link.writes), PATIENCE)
    for _ in range(5):
        prefill.step()
    early = pair.outcome("drained", places, PATIENCE)
    link.open.set()
    return early, pair.end("drained", places, content=11), link.writes[:], pair.left()


def failed(pair: Pair) -> Any:
    """An early write fails, and a rest of it comes later: nothing is said of its request, and nothing more is written."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("failed")
    prefill.compute("failed", content=12)
    del link.writes[:]
    link.refuse = 1
    prefill.step()
    wait(lambda: not link.refuse, PATIENCE)
    for _ in range(5):
        prefill.step()
    outcome = pair.outcome("failed", places, PATIENCE)
    link.refuse = 0
    prefill.fill(8)
    held = prefill.taken()
    link.later()
    return outcome, link.writes[:], held, pair.came(places, content=12), expired(pair, "failed"), pair.left()


def failed_and_aborted(pair: Pair) -> Any:
    """An early write fails, its prefill is given up, and a rest of it comes when all other blocks were used again."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("both")
    prefill.compute("both", content=13)
    link.refuse = 1
    prefill.step()
    wait(lambda: not link.refuse, PATIENCE)
    assert pair.settled()
    prefill.abort("p-both")
    prefill.step()
    outcome = pair.outcome("both", places, PATIENCE)
    link.refuse = 0
    prefill.fill(8)
    held = prefill.taken()
    link.later()
    return outcome, held, pair.came(places, content=13), expired(pair, "both"), pair.left()


def failed_and_let_go(pair: Pair) -> Any:
    """An early write fails, and decode lets go of its transfer: prefill's blocks are held all the same."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("let-go")
    prefill.compute("let-go", content=17)
    link.refuse = 1
    prefill.step()
    wait(lambda: not link.refuse, PATIENCE)
    for _ in range(5):
        prefill.step()
    assert wait(lambda: not link.refuse)
    assert pair.settled()
    pair.lets_go("let-go")

    def free() -> bool:
        prefill.step()
        pair.decode.step()  # to 0.23 a decode engine hears of the end of this too, and dies of it
        return not prefill.taken()

    freed = wait(free, PATIENCE)
    prefill.fill(8)
    link.later()
    return freed, pair.came(places, content=17) in (2, [2, 0, 0]), expired(pair, "let-go"), pair.left()


def failed_and_again(pair: Pair) -> Any:
    """An early write fails, its prefill is given up, and one more comes under the same transfer, and is asked for."""
    prefill, link = pair.prefill, pair.prefill.link
    pair.ask("twice")
    prefill.compute("twice", content=18)
    link.refuse = 1
    prefill.step()
    wait(lambda: not link.refuse, PATIENCE)
    link.refuse = 0
    assert pair.settled()
    prefill.abort("p-twice")
    prefill.step()
    prefill.compute("twice-1", content=18, transfer="twice")
    prefill.abort("p-twice-1")  # which has not begun
    prefill.step()
    prefill.compute("twice-2", content=18, transfer="twice")
    prefill.step()
    places = pair.ask("twice-2", transfer="twice")
    for _ in range(6):
        prefill.step()
    outcome, came = pair.outcome("twice-2", places, PATIENCE * 10), pair.came(places, content=18)
    link.later()
    while kept := {name for name, entry in prefill.worker.reqs_need_send.items() if entry.p_req_id}:
        for name in kept:
            prefill.worker.reqs_need_send[name].expire_time = 0.0
        prefill.fill(1)
    return outcome, came, pair.left()


def stuck(pair: Pair) -> Any:
    """The prefill is preempted while an early write is under way that does not end: decode's engine is stopped, say."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("stuck")
    prefill.compute("stuck", content=15)
    begun = link.begun
    link.open.clear()
    prefill.step()
    under_way = wait(lambda: link.begun > begun, PATIENCE)
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    wait_at_most(PATIENCE)
    prefill.again = 50.0
    stepping = threading.Thread(target=prefill.step)
    stepping.start()
    stepping.join(PATIENCE * 10)
    goes_on = not stepping.is_alive()
    link.open.set()
    stepping.join()
    assert pair.settled()
    del link.writes[:]
    result = pair.end("stuck", places, content=15, again=50.0)
    prefill.again = 0.0
    return under_way, goes_on, result, link.writes[:], pair.left()


def given_up_amid(pair: Pair, name: str, content: int) -> tuple[list[int], bool, threading.Event]:
    """A prefill is given up amid an early write that does not end; other writes do. What ends that one."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask(name)
    prefill.compute(name, content=content)
    begun, shut = link.begun, link.open
    shut.clear()
    prefill.step()
    under_way = wait(lambda: link.begun > begun, PATIENCE)
    link.open = threading.Event()  # for those that come now
    link.open.set()
    prefill.abort(f"p-{name}")
    prefill.step()
    return places, under_way, shut


def taken_in_the_end(pair: Pair, most: int = 2) -> int:
    """How many blocks of prefill's do not come back while a write that reads some of them is under way."""

    def only_those() -> bool:
        if pair.prefill.scheduler.requests:
            pair.prefill.step()
        return pair.prefill.taken() <= most

    wait(only_those, PATIENCE * 10)
    return pair.prefill.taken()


def stuck_again(pair: Pair) -> Any:
    """A prefill is given up amid an early write that does not end, and comes again under its transfer for another."""
    prefill = pair.prefill
    _, under_way, shut = given_up_amid(pair, "stuck-again", 37)
    prefill.compute("stuck-again-2", content=38, transfer="stuck-again")
    stepping = threading.Thread(target=prefill.step)
    stepping.start()
    stepping.join(PATIENCE * 10)
    goes_on = not stepping.is_alive()
    if not goes_on:
        shut.set()
    stepping.join()
    places = pair.ask("stuck-again-2", transfer="stuck-again")
    for _ in range(5):
        prefill.step()
    outcome = pair.outcome("stuck-again-2", places, PATIENCE * 10), pair.came(places, content=38)
    held = taken_in_the_end(pair)
    shut.set()
    assert pair.settled()
    return under_way, goes_on, outcome, held, pair.left()


def asked_first(pair: Pair) -> Any:
    """The same, and who asks for the one that comes again asks before it begins."""
    prefill = pair.prefill
    first, under_way, shut = given_up_amid(pair, "asked-first", 44)
    places = pair.ask("asked-first-2", transfer="asked-first", arrives=False)
    outcome = pair.outcome("asked-first-2", places, PATIENCE * 4)
    prefill.compute("asked-first-2", content=40, transfer="asked-first")
    for _ in range(6):
        prefill.step()
    if outcome == "nothing is told":
        outcome = pair.outcome("asked-first-2", places, PATIENCE * 10)
    held = [pair.outcome("asked-first", first, PATIENCE)]
    shut.set()
    assert pair.settled()
    held.append(pair.outcome("asked-first", first, PATIENCE * 10))
    places = pair.ask("asked-first-3", transfer="asked-first", arrives=False)
    return under_way, outcome, held, pair.outcome("asked-first-3", places, PATIENCE * 10), pair.left()


def again_and_again(pair: Pair) -> Any:
    """The same, and each that comes again is given up: only the first one's blocks are held."""
    prefill = pair.prefill
    _, under_way, shut = given_up_amid(pair, "often", 45)
    taken = []
    for number in (2, 3):
        prefill.compute(f"often-{number}", content=40 + number, transfer="often")
        prefill.step()
        prefill.abort(f"p-often-{number}")
        prefill.step()
        taken.append(taken_in_the_end(pair))
    shut.set()
    assert pair.settled()
    return under_way, taken, pair.left()


def asleep(pair: Pair) -> Any:
    """The engine goes to sleep amid two prefills, and its memory is taken; one of them is asked for only then."""
    prefill, link, connector = pair.prefill, pair.prefill.link, pair.prefill.side.connector
    if not hasattr(connector, "restore_kv_caches"):  # before 0.33.0 Mooncake's connector knows nothing of it
        return None
    one = pair.ask("asleep")
    prefill.compute("asleep", content=16)
    prefill.compute("asked", content=19)
    begun = link.begun
    link.open.clear()
    prefill.step()
    under_way = wait(lambda: link.begun > begun, PATIENCE)
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)  # as the engine core does
    sleeping = threading.Thread(target=connector.unregister_kv_caches)
    sleeping.start()
    sleeping.join(PATIENCE if under_way else sides.SECONDS)
    waits = sleeping.is_alive()
    link.open.set()
    sleeping.join()
    assert pair.settled()
    begun = link.begun
    prefill.side.cache.fill_(-7.0)
    other = pair.ask("asked")
    written = wait(lambda: link.begun > begun, PATIENCE)
    assert pair.settled()
    connector.restore_kv_caches()
    result = pair.end("asleep", one, content=16), pair.end("asked", other, content=19)
    return under_way, waits, written, result, pair.left()


class Counting:
    """In the place of decode's decoder of answers: how many there were."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self.heard = 0

    def decode(self, data: Any) -> Any:
        self.heard += 1
        return self._own.decode(data)


def silent(pair: Pair) -> Any:
    """An early write for one of two in an ask fails, and its prefill ends: decode's wait for the other begins anew.

    Prefill's does. Else decode would take its blocks back, from 0.30.0 on, when prefill may still write there.
    """
    prefill, worker = pair.prefill, pair.decode.worker
    places = {name: pair.places(name) for name in ("fails", "waits")}
    pair.decode.step()
    assert wait(lambda: {*places} <= {*prefill.worker.reqs_need_send})
    holder, name = worker, "_xfer_resp_decoder"
    if hasattr(worker._xfer_resp_decoder, "own"):  # `mooncake-failed-loads`
        holder, name = worker._xfer_resp_decoder, "own"
    answers = Counting(getattr(holder, name))
    setattr(holder, name, answers)
    prefill.compute("fails", content=27)
    prefill.link.refuse = 1
    for _ in range(5):
        prefill.step()
    assert wait(lambda: not prefill.link.refuse)
    heard = wait(lambda: answers.heard > 0, PATIENCE * 4)
    setattr(holder, name, answers._own)
    prefill.compute("waits", content=28)
    result = pair.end("waits", places["waits"], content=28)
    prefill.link.later()
    return heard, result, expired(pair, "fails"), pair.left()


def beside(pair: Pair) -> Any:
    """A prefill waits to be fetched, and one that came again under its transfer is given up: whose blocks come back."""
    prefill = pair.prefill
    prefill.compute("beside", content=29)
    for _ in range(5):
        prefill.step()
    prefill.compute("beside-2", content=36, transfer="beside")
    prefill.step()
    prefill.abort("p-beside-2")

    def back() -> bool:
        prefill.step()
        return prefill.taken() <= 8

    came_back = wait(back, PATIENCE * 4)
    places = pair.ask("beside", arrives=False)
    outcome = pair.outcome("beside", places, PATIENCE * 4)
    for name in prefill.scheduler.requests:  # of which nothing is told any more
        prefill.worker.finished_sending_reqs.add(name)
    return came_back, outcome, pair.left()


def both_given_up(pair: Pair) -> Any:
    """Two of one ask are given up, each amid an early write; that for the first ends before that for the second."""
    prefill, link = pair.prefill, pair.prefill.link
    names = ["first-of-two", "second-of-two"]
    places = [pair.places(name) for name in names]
    pair.decode.step()
    assert wait(lambda: {*names} <= {*prefill.worker.reqs_need_send})
    begun, shut = link.begun, []
    for number, name in enumerate(names):
        prefill.compute(name, content=22 + number)
        link.open = threading.Event()
        shut.append(link.open)
        prefill.step()
        wait(lambda: len(shut) == link.begun - begun, PATIENCE)
    under_way = link.begun - begun
    link.open = threading.Event()
    link.open.set()
    for name in names:
        prefill.abort(f"p-{name}")
        prefill.step()
        assert wait(lambda: name not in prefill.worker.reqs_need_send)  # noqa: B023
    shut[0].set()

    def outcomes() -> list[str]:
        return [pair.outcome(name, place, PATIENCE) for name, place in zip(names, places, strict=True)]

    before = outcomes()
    shut[1].set()
    assert pair.settled()
    wait(lambda: outcomes() != before, PATIENCE * 4)
    came = [pair.came(place, content=22 + number) for number, place in enumerate(places)]
    return under_way, before, outcomes(), "wrong" in str(came), pair.left()


def timed_out(pair: Pair) -> Any:
    """Amid an early write that does not end an ask is waited for no more, and then the time of prefill's blocks is up."""
    prefill, link = pair.prefill, pair.prefill.link
    os.environ[engines.ABORT] = "1"
    places = pair.ask("timed-out")
    prefill.compute("timed-out", content=21)
    begun, shut = link.begun, link.open
    shut.clear()
    prefill.step()
    under_way = wait(lambda: link.begun > begun, PATIENCE)
    assert wait(pair.closed)
    os.environ[engines.ABORT] = "600"
    link.open = threading.Event()  # for those that come now
    link.open.set()
    for _ in range(5):
        prefill.step()
    freed = expired(pair, "timed-out")
    prefill.fill(8)
    shut.set()
    assert pair.settled()
    return (
        under_way,
        freed,
        pair.came(places, content=21),
        pair.outcome("timed-out", places, PATIENCE * 10),
        pair.left(),
    )


def decode_aborted(pair: Pair) -> Any:
    """Decode's request is aborted while an early write for it is under way: its blocks come back when all has come."""
    prefill, decoding, link = pair.prefill, pair.decoding, pair.prefill.link
    where = {"remote_engine_id": "prefill", "remote_bootstrap_addr": f"http://127.0.0.1:{prefill.side.port}"}
    decoding.add("d-gone", content=14, do_remote_prefill=True, transfer_id="gone", **where)
    decoding.step()
    assert wait(lambda: "gone" in prefill.worker.reqs_need_send)
    prefill.compute("gone", content=14)
    begun = link.begun
    link.open.clear()
    prefill.step()
    under_way = wait(lambda: link.begun > begun, PATIENCE)
    decoding.abort("d-gone")
    for number in range(6):
        decoding.add(f"other-{number}", content=30 + number, tokens=20)
    for _ in range(10):  # until they are all computed, and go on
        decoding.step()
    held = decoding.blocks("d-gone")
    others = {one.request_id: decoding.blocks(one.request_id)[:7] for one in decoding.scheduler.running}
    link.open.set()

    def sent() -> bool:
        prefill.step()
        return not prefill.taken()

    came = wait(sent, 10)
    right = [content for content in range(30, 36) if decoding.computed(others[f"other-{content - 30}"], content)]
    for _ in range(30):
        decoding.step()
    again = set(held) & {number for blocks in others.values() for number in blocks}
    return under_way, len(held), again == set(), came, len(right), decoding.taken(), pair.left()


def many(pair: Pair) -> Any:
    """As many asks as prefill has tasks, and more, for prompts that are computed at once."""
    names = [f"many-{number}" for number in range(7)]
    places = {}
    for number, name in enumerate(names):
        places[name] = pair.ask(name)
        pair.prefill.compute(name, content=20 + number)
    return [pair.end(name, places[name], content=20 + number) for number, name in enumerate(names)], pair.left()


def forgotten(pair: Pair) -> int:
    """How many prefills are remembered when all are over."""
    writes = getattr(pair.prefill.worker, "_livepatch_writes", None)
    pair.prefill.step()
    return len(writes._whole) if writes is not None else 0


def order(pair: Pair) -> list[str]:
    """Whose wrappers an ask of decode's comes through, from the outermost on."""
    found = []
    function: Any = type(pair.prefill.worker).send_kv_to_decode
    while hasattr(function, "__wrapped__"):
        held = [function, *contained(function), *(one for two in contained(function) for one in contained(two))]
        places = [one.__module__.split(".") for one in held]
        found += [place[place.index("patches") + 1] for place in places if "patches" in place]
        function = function.__wrapped__
    return found


def contained(function: Any) -> list[Any]:
    """The functions that a function closes over."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [one for one in cells if isinstance(one, FunctionType) and one is not getattr(function, "__wrapped__", None)]


CASES = (
    order,
    chunks,
    late,
    amid,
    hits,
    same_step,
    aborted,
    begun_again,
    preempted,
    computed_anew,
    drained,
    many,
    more,
    failed,
    failed_and_aborted,
    failed_and_let_go,
    failed_and_again,
    decode_aborted,
    stuck,
    stuck_again,
    asked_first,
    again_and_again,
    asleep,
    both_given_up,
    timed_out,
    silent,
    beside,
    forgotten,
)


def main() -> None:
    engines.drive(lambda model_config: engines.played(CASES, Pair(model_config), sys.argv[2:]))


if __name__ == "__main__":
    main()
