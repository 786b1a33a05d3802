"""The same engines as in mooncake_layerwise.py: prefills that are given up while their blocks may be read; prints JSON.

`mooncake_given_up.py PATIENCE`. The last case leaves the patch aside.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import threading
from typing import Any

import mooncake_engines as engines
from mooncake_engines import PATIENCE, Pair
from result import wait


def after_another(pair: Pair) -> Any:
    """An early write fails; another prefill of the transfer is given up before it begins, and then the first one."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("first")
    prefill.compute("first", content=21)
    link.refuse = 1
    prefill.step()
    wait(lambda: not link.refuse, PATIENCE)
    assert pair.settled()
    prefill.compute("second", content=21, transfer="first")
    prefill.abort("p-second")
    prefill.step()
    assert wait(lambda: "first" not in prefill.worker.reqs_need_send)
    prefill.abort("p-first")
    prefill.step()
    link.refuse = 0
    prefill.fill(8)  # more than is free
    held = prefill.taken()
    link.later()
    return held, pair.came(places, content=21), engines.expired(pair, "first"), pair.left()


def before_a_third(pair: Pair) -> Any:
    """An early write does not end; another prefill of the transfer is given up, a third one begins, and then the first
    is given up: what the release lets go of then is the third one's."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("third")
    prefill.compute("third", content=23)
    begun, shut = link.begun, link.open
    shut.clear()
    prefill.step()
    under_way = wait(lambda: link.begun > begun, PATIENCE)
    link.open = threading.Event()  # for those that come now
    link.open.set()
    a_third_begins(prefill, "third", content=24)
    prefill.abort("p-third")
    prefill.step()
    prefill.abort("p-third-3")
    prefill.fill(8)
    held = prefill.taken()
    shut.set()
    assert pair.settled()
    return under_way, held, pair.came(places, content=23), pair.outcome("third", places, PATIENCE * 10), pair.left()


def failed_before_a_third(pair: Pair) -> Any:
    """The same, and the early write fails."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("fourth")
    prefill.compute("fourth", content=25)
    link.refuse = 1
    prefill.step()
    wait(lambda: not link.refuse, PATIENCE)
    link.refuse = 0
    assert pair.settled()
    a_third_begins(prefill, "fourth", content=26)
    prefill.abort("p-fourth")
    prefill.step()
    prefill.abort("p-fourth-3")
    prefill.fill(8)
    held = prefill.taken()
    link.later()
    return held, pair.came(places, content=25), engines.expired(pair, "fourth"), pair.left()


def a_third_begins(prefill: engines.Prefill, transfer: str, content: int) -> None:
    """Under a transfer, where a second prefill was given up before it began."""
    prefill.compute(f"{transfer}-2", content=content, transfer=transfer)
    prefill.abort(f"p-{transfer}-2")
    prefill.step()
    assert wait(lambda: transfer not in prefill.worker.reqs_need_send)
    prefill.compute(f"{transfer}-3", content=content, transfer=transfer)
    prefill.step()
    assert wait(lambda: transfer in prefill.worker.reqs_need_send)


def aside(pair: Pair) -> Any:
    """The scheduler's side stands aside amid an early write that does not end, and then its prefill is given up."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("aside")
    prefill.compute("aside", content=22)
    begun = link.begun
    link.open.clear()
    prefill.step()
    under_way = wait(lambda: link.begun > begun, PATIENCE)
    engines.wait_at_most(PATIENCE)
    prefills = getattr(prefill.scheduler.connector.connector_scheduler, "_livepatch_prefills", None)
    if prefills is not None:
        prefills._allot = None
    prefill.step()
    prefill.abort("p-aside")
    prefill.step()
    prefill.fill(8)
    held = prefill.taken()
    link.open.set()
    assert pair.settled()
    return under_way, held, pair.came(places, content=22), pair.outcome("aside", places, PATIENCE * 10), pair.left()


CASES = (after_another, before_a_third, failed_before_a_third, aside)


def main() -> None:
    engines.drive(lambda model_config: engines.played(CASES, Pair(model_config)))


if __name__ == "__main__":
    main()
