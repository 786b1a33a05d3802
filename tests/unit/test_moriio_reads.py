"""What the release tests of MoRI-IO's reads leave out: whose side reads, and whose blocks come back by a send's end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.moriio_timeouts import reads
from vllm_livepatch.sitecustomize.context import PatchContext


def side(mode: str = "READ", *, producer: bool = False) -> SimpleNamespace:
    return SimpleNamespace(is_producer=producer, mode=SimpleNamespace(name=mode))


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (side(), True),
        (side(producer=True), False),
        (side("WRITE"), False),
        (side("WRITE", producer=True), False),
        (None, False),  # a connector has a scheduler's side or a worker's
    ],
)
def test_only_a_decode_engine_in_read_mode_reads(of: Any, expected: bool) -> None:
    assert reads.reads_here(of) is expected


class Connector:
    """A connector whose worker has read for "one"; "two" is still under way."""

    def __init__(self, *, kept_as_sends: bool, worker: Any = None) -> None:
        facts = {"reads_kept_as_sends": kept_as_sends}
        context = PatchContext("moriio-timeouts", {"TRANSFER_SECONDS": 1.0}, facts, lambda: None)
        self.wrapper = reads.wrappers(context, lambda worker, wanted: {})[f"{reads.CONNECTOR}.get_finished"]
        self.connector_worker = worker or side()
        self.reads = reads.reads_of(self.connector_worker)
        self.reads.finishing.update(("one", "two"))
        self.reads.under_way["two"] = reads.Read([3], "peer:1")
        self.reads.ended.add("one")

    def get_finished(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper(lambda *args, **kwargs: ({"sent"}, {"what the release says"}), self, args, kwargs)


@pytest.mark.parametrize("by_name", [False, True])
def test_to_0_15_a_finished_request_gives_its_blocks_back_once_its_read_has_ended(by_name: bool) -> None:
    connector = Connector(kept_as_sends=True)

    def finished(*names: str) -> Any:
        return connector.get_finished(finished_req_ids=set(names)) if by_name else connector.get_finished(set(names))

    assert finished() == ({"sent"}, {"one"}), "none has finished"
    assert finished("one", "two", "another") == ({"sent", "one"}, set())
    del connector.reads.under_way["two"]
    assert finished() == ({"sent", "two"}, set())
    assert finished("one") == ({"sent"}, set()), "each is given back once"


def test_since_0_16_blocks_are_given_back_by_the_scheduler_alone() -> None:
    connector = Connector(kept_as_sends=False)
    assert connector.get_finished({"one", "two"}) == ({"sent"}, {"one"})
    assert connector.get_finished({"one", "two"}) == ({"sent"}, set())


def test_a_side_that_does_not_read_answers_as_the_release() -> None:
    connector = Connector(kept_as_sends=True, worker=side("WRITE"))
    assert connector.get_finished({"one"}) == ({"sent"}, {"what the release says"})
