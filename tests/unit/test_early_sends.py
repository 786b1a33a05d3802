"""What the release tests leave out of a MultiConnector's early sends: bounds, ids used again, errors of the patch's own."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
from vllm_livepatch.patches.stale_finished_recving import early_sends
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext


class Child:
    """Says what it is told to say."""

    def __init__(self) -> None:
        self.made: Any = None  # from 0.30: what it answered last
        self.sent: Any = None
        self.received: set[str] | None = None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.sent, self.received


class Multi:
    """As much of MultiConnector as the patch wraps or asks: it passes on what the children say, by child."""

    def __init__(self, *children: Any) -> None:
        self._connectors = list(children)

    def get_finished(self, finished_req_ids: set[str]) -> list[Any]:
        return [child.get_finished(finished_req_ids) for child in self._connectors]


@dataclasses.dataclass
class Results:
    """Stands in for KVConnectorTransferResults."""

    finished_sending: set[str]
    failed_recving: set[str]


class NewChild(Child):
    def get_transfer_results(self, finished_req_ids: set[str]) -> Results:
        self.made = made = Results(self.get_finished(finished_req_ids)[0] or set(), {"failed"})
        return made


class NewMulti(Multi):
    """From 0.30."""

    def get_finished(self, finished_req_ids: set[str]) -> list[Any]:
        return self.get_transfer_results(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> list[Any]:
        return [child.get_transfer_results(finished_req_ids) for child in self._connectors]


class World:
    def __init__(self, context: PatchContext | None = None, new: bool = False) -> None:
        self.context = context or PatchContext("stale-finished-recving", {}, {}, lambda: None)
        self.child, self.other = (NewChild(), NewChild()) if new else (Child(), Child())
        base = NewMulti if new else Multi
        members: dict[str, Any] = {}
        for target, wrapper in early_sends.wrappers(self.context).items():
            name = target.rpartition(".")[2]
            if name in vars(base):
                members[name] = guard.in_place_of(vars(base)[name], wrapper, self.context, target)
        self.multi = type("PatchedMulti", (base,), members)(self.child, self.other)

    def step(self, finished: Iterable[str] = (), sent: Iterable[str] = ()) -> set[str]:
        """What the first child is taken to have sent in a step that tells of these ends, in which it reports those."""
        self.child.sent = set(sent) or None
        return set(self.multi.get_finished(set(finished))[0][0] or ())


def test_a_send_is_given_out_once_with_the_news_of_its_end() -> None:
    world = World()
    assert world.step(sent=["a"]) == set()
    assert world.step() == set()
    assert world.step(finished=["b", "a"]) == {"a"}
    assert world.step(finished=["c"]) == set()
    assert world.step(sent=["b"]) == {"b"}
    assert world.context.counters == {"send_early": 1}


def test_what_a_child_says_is_not_changed() -> None:
    world = World()
    world.child.sent = given = {"a"}
    world.child.received = {"r"}
    assert world.multi.get_finished(set())[0] == (None, {"r"})
    assert given == {"a"}
    world.child.sent = None
    assert world.multi.get_finished(finished_req_ids={"a"})[0] == ({"a"}, {"r"})


def test_from_0_30_the_other_results_stay() -> None:
    world = World(new=True)
    world.child.sent = {"a"}
    assert world.multi.get_finished(set())[0] == Results(set(), {"failed"})
    assert world.child.made == Results({"a"}, {"failed"}), "the child's own is left as it was"
    world.child.sent = None
    assert world.multi.get_transfer_results({"a"})[0] == Results({"a"}, {"failed"})
    world.child.sent = {"b"}
    assert world.multi.get_transfer_results({"b"})[0] is world.child.made, "passed on as it is"
    assert "get_finished" not in vars(world.child), "one of the two ways is enough"


def test_a_connector_that_is_dropped_is_collected() -> None:
    """With what is remembered of its children."""
    world = World()
    world.step(finished=["a"])
    context, child = world.context, weakref.ref(world.child)
    remembered = weakref.ref(next(iter(context._lasting.values())))
    del world
    gc.collect()
    assert (child(), remembered()) == (None, None)


def test_each_child_is_kept_back_by_itself() -> None:
    world = World()
    world.child.sent, world.other.sent = {"a"}, None
    world.multi.get_finished({"a"})
    world.child.sent, world.other.sent = None, {"a"}
    assert world.multi.get_finished(set())[1] == ({"a"}, None), "the first child's send is not the other's"


def test_an_id_that_is_used_again_is_early_again() -> None:
    world = World()
    world.step(finished=["a"])
    assert world.step(sent=["a"]) == {"a"}
    assert world.step(sent=["a"]) == set(), "of the next life"
    assert world.step(finished=["a"]) == {"a"}
    assert world.step(sent=["a"]) == set(), "of the one after that"


def test_a_send_is_never_kept_for_ever() -> None:
    world = World()
    assert world.step(sent=["stranger"]) == set()
    assert [world.step() for _ in range(early_sends.PATIENCE)] == [set()] * (early_sends.PATIENCE - 1) + [{"stranger"}]
    assert world.step(finished=["stranger"]) == set(), "once"


def test_a_send_that_is_reported_twice_is_given_out_once() -> None:
    world = World()
    world.step(sent=["a"])
    world.step(sent=["a"])
    assert world.step(finished=["a"], sent=["a"]) == {"a"}
    assert [world.step() for _ in range(early_sends.PATIENCE)] == [set()] * early_sends.PATIENCE
    assert world.context.counters == {"send_early": 1}
    world.step(sent=["b"])
    world.step(sent=["b"])
    waited = [world.step() for _ in range(early_sends.PATIENCE - 1)]
    assert waited[-1] == {"b"}, "it waits from the first time on"


def test_an_answer_that_the_patch_cannot_read_is_passed_on() -> None:
    world = World()
    world.child.sent = [["not", "an", "id"]]
    assert world.multi.get_finished(set())[0] == ([["not", "an", "id"]], None)
    assert world.context.aside


def test_what_is_remembered_is_bounded_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_sends, "REMEMBERED", 2)
    world = World()
    world.step(finished=["a"])
    world.step(finished=["b"])
    world.step(finished=["a"])  # the newest now
    world.step(finished=["c"])
    assert world.step(sent=["a", "b", "c"]) == {"a", "c"}


def test_what_is_kept_is_given_out_after_the_patch_has_stood_aside() -> None:
    world = World()
    world.step(sent=["a", "lost"])
    world.context.stand_aside("elsewhere", ValueError("broken"))
    assert world.step(sent=["b"]) == {"b"}, "nothing new is kept"
    assert world.step(finished=["a"]) == {"a"}
    assert [world.step() for _ in range(early_sends.PATIENCE)].count({"lost"}) == 1


def test_an_error_of_the_report_changes_nothing_of_what_is_done() -> None:
    def cannot_count() -> None:
        raise OSError("no report")

    world = World(PatchContext("stale-finished-recving", {}, {}, cannot_count))
    assert world.step(sent=["a"]) == set()
    assert world.context.aside
    assert world.step(finished=["a"]) == {"a"}


def test_children_that_cannot_be_seen_to_leave_the_release_as_it_is() -> None:
    logged: list[str] = []
    world = World(PatchContext("stale-finished-recving", {}, {}, lambda: None, failed=logged.append))
    world.multi._connectors = _Once([world.child, world.other])
    assert world.step(sent=["a"]) == {"a"}
    assert world.context.aside
    assert "RuntimeError" in logged[0]


class _Once(list[Any]):
    """A list that the patch cannot go through, and the release can."""

    asked = False

    def __iter__(self) -> Any:
        if not self.asked:
            self.asked = True
            raise RuntimeError("not now")
        return super().__iter__()
