# mypy: disable-error-code="import-not-found"
"""Let one release's real MultiConnector tell its worker how many children send a request, and let these end; print JSON.

Both sides are the release's own class, made without its constructor; the children are doubles that say what they are
told to say. A case's steps were scheduled as the engine does: each carries the metadata and the ids of finished
requests that there were when it was scheduled, and `ahead` steps were scheduled before the request ended.
"""

from __future__ import annotations

from result import all_attempted, begin_driver, print_result

begin_driver()

import logging
from collections.abc import Sequence
from typing import Any

import vllm
from completion_world import ID, bare, found, reported, request


class Child:
    """A child that announces a send and says, call by call, what it is told to say: S, R, both, or nothing."""

    def __init__(self, says: Sequence[str], announces: bool = True) -> None:
        self.says, self.announces = list(says), announces
        self.seen: list[Any] = []

    def request_finished(self, ended: Any, blocks: list[int]) -> tuple[bool, None]:
        return self.announces, None

    def build_connector_meta(self, scheduled: Any) -> Any:
        return found("KVConnectorMetadata", "base")()

    def bind_connector_metadata(self, metadata: Any) -> None:
        self.seen.append(metadata)

    def get_finished(self, ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        letters = self.says.pop(0)
        return ({ID} if "S" in letters else None), ({ID} if "R" in letters else None)

    def get_transfer_results(self, ids: set[str]) -> Any:
        sent, received = self.get_finished(ids)
        return found("KVConnectorTransferResults", "base")(
            finished_sending=set(sent or ()), finished_recving=set(received or ())
        )


def multi(*children: Any) -> Any:
    return bare(
        found("MultiConnector", "multi_connector"),
        _connectors=list(children),
        _extra_async_saves={},
        _requests_to_connector={},
        _connector_metadata=None,
    )


def report(worker: Any, ids: set[str]) -> str:
    """What the worker is told: the release's model runner asks the newer method where there is one."""
    if hasattr(worker, "get_transfer_results"):
        results = worker.get_transfer_results(ids)
        return reported((results.finished_sending, results.finished_recving))
    return reported(worker.get_finished(ids))


def play(*says: Sequence[str], ahead: int = 1, nested: bool = False, announces: Sequence[bool] = ()) -> dict[str, Any]:
    """What is passed on in each step, and the counts that are left. `nested`: the first two are one child's children."""

    def side() -> Any:
        made = [Child(letters, bool(not announces or announces[place])) for place, letters in enumerate(says)]
        return multi(multi(*made[:2]), *made[2:]) if nested else multi(*made)

    scheduler, worker = side(), side()
    finished: set[str] = set()
    steps = [(scheduler.build_connector_meta(None), finished) for _ in range(ahead)]
    announced = scheduler.request_finished(request(), [1])[0]
    finished = {ID}
    reports = []
    for _ in range(len(says[0])):
        steps.append((scheduler.build_connector_meta(None), finished))
        finished = set()
        metadata, ids = steps.pop(0)
        worker.bind_connector_metadata(metadata)
        reports.append(report(worker, ids))
    levels = [worker, worker._connectors[0]] if nested else [worker]
    last = max(step for child in says for step, letters in enumerate(child) if "S" in letters)
    return {
        "announced": announced,
        "last": max(last, ahead),  # when the last has ended, and the worker knows how many there are
        "reports": reports,
        "left": [level._extra_async_saves for level in levels if level._extra_async_saves],
    }


CASES: dict[str, Any] = {
    "first_is_early": lambda: play(["S", "", ""], ["", "", "S"]),
    "second_is_early": lambda: play(["", "", "S"], ["S", "", ""]),
    "other_with_the_news": lambda: play(["S", "", ""], ["", "S", ""]),
    "both_early_at_once": lambda: play(["S", "", ""], ["S", "", ""]),
    "both_early_one_after_the_other": lambda: play(["S", "", "", ""], ["", "S", "", ""], ahead=2),
    "one_announces": lambda: play(["S", "", ""], ["", "", ""], announces=[True, False]),
    "three": lambda: play(["S", "", "", ""], ["", "", "S", ""], ["", "", "", "S"]),
    "nested": lambda: play(["S", "", "", ""], ["", "", "", "S"], ["", "", "S", ""], nested=True),
    "receive_does_not_wait": lambda: play(["SR", "", ""], ["", "", "S"]),
    "none_is_early": lambda: play(["", "S", "", ""], ["", "", "", "S"]),
}


def main() -> None:
    logging.disable(logging.CRITICAL)
    print_result({"cases": all_attempted(CASES)}, vllm)


if __name__ == "__main__":
    main()
