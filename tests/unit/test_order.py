"""Two patches of one target: whose wrapper is called first, and which is left out where another one applies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import order
from vllm_livepatch.sitecustomize.decision import Patch, PatchError
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.tools.bundles import catalogue

from tests.unit.support import PYTHON, STEP, STOCK, USE_STEP, WORK, Cli, Done, Sandbox, finish
from tests.unit.test_changed_module import diff_patch

NAMED = """\
def wrappers(livepatch):
    def around(original, *rest, **named):
        livepatch.count("calls")
        return [livepatch.name, *original(*rest, **named)]

    def of_method(original, instance, *rest, **named):
        return around(original, *rest, **named)

    return {target: of_method if "Scheduler" in target else around for target in TARGETS}
"""
"""Each call's answer begins with the names of the patches that it went through."""


def patch(name: str, **facts: Any) -> Patch:
    return to_patch(name, {"title": name, "package": "engine", "targets": ["engine.a:f"], **facts})


def called(sandbox: Sandbox, **environ: str) -> list[str]:
    """The patches that a call of `step` goes through, the first one first."""
    done = sandbox.python(
        "import json; from fakeengine.scheduler import Scheduler; print(json.dumps(Scheduler().step(7)))", **environ
    )
    assert not done.others, done.err
    return list(json.loads(done.out)[:-1])


# Whose wrapper is called first


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ({}, ["c", "b", "a"]),
        ({"a": {"outside": ["b"]}}, ["c", "a", "b"]),
        ({"a": {"outside": ["c"]}}, ["b", "a", "c"]),
        ({"c": {"inside": ["a"]}}, ["b", "a", "c"]),
        ({"b": {"inside": ["a"]}, "c": {"inside": ["b"]}}, ["a", "b", "c"]),
        ({"a": {"outside": ["b", "c"]}}, ["a", "c", "b"]),
        ({"a": {"inside": ["b"], "outside": ["not-here"]}}, ["c", "b", "a"]),
    ],
)
def test_in_the_order_that_they_say(sandbox: Sandbox, says: dict[str, Any], expected: list[str]) -> None:
    for name in "abc":
        sandbox.patch(name, code=NAMED, **says.get(name, {}))
    sandbox.generate()
    assert called(sandbox) == expected


def test_by_way_of_one_that_is_not_applied(sandbox: Sandbox) -> None:
    for name, says in (("a", {"outside": ["b"]}), ("b", {"outside": ["c"]}), ("c", {})):
        sandbox.patch(name, code=NAMED, **says)
    sandbox.generate()
    assert called(sandbox) == ["a", "b", "c"]
    assert called(sandbox, LIVEPATCH_B="off") == ["a", "c"]


LATE = """
from fakeengine.scheduler import Scheduler
step = Scheduler.step
print(Scheduler().step(7))
import fakeengine.worker
print(Scheduler().step(7), fakeengine.worker.work(8))
print(Scheduler().step(7))
"""


def test_one_that_comes_late_is_put_beneath_those_that_it_is_inside_of(sandbox: Sandbox) -> None:
    """Its second module is imported after the others are applied, and called."""
    sandbox.patch("around", code=NAMED)
    sandbox.patch("late", [STEP, WORK], code=NAMED, inside=["around"])
    sandbox.patch("over", code=NAMED)
    sandbox.generate()
    done = sandbox.python(LATE.replace("step = Scheduler.step\n", ""))
    assert done.out.splitlines() == [
        "['over', 'around', 7]",
        "['over', 'around', 'late', 7] ['late', 8]",
        "['over', 'around', 'late', 7]",
    ]
    assert not done.others
    counted = {one["name"]: (one["state"], one["reason"], one["counters"]) for one in sandbox.report()["patches"]}
    assert counted == {
        "around": ("applied", None, {"calls": 3}),
        "late": ("applied", None, {"calls": 3}),
        "over": ("applied", None, {"calls": 3}),
    }


def test_other_names_and_other_threads_find_the_new_one_at_once(sandbox: Sandbox) -> None:
    """The program has imported the function by its name; another thread calls it all the while, and misses nobody."""
    sandbox.patch("around", [WORK], code=NAMED)
    sandbox.patch("late", [STEP, WORK], code=NAMED, inside=["around"])
    sandbox.patch("over", [WORK], code=NAMED)
    sandbox.generate()
    done = sandbox.python("""
        import threading
        from fakeengine import worker
        from fakeengine.worker import work
        found, stop = set(), threading.Event()
        def calls():
            while not stop.is_set():
                found.add(str(worker.work(7)))
        thread = threading.Thread(target=calls)
        thread.start()
        print(work(8))
        import fakeengine.scheduler
        print(work(8))
        while len(found) < 2:
            stop.wait(0.01)
        stop.set()
        thread.join()
        print(*sorted(found))
    """)
    assert done.out.splitlines() == [
        "['over', 'around', 8]",
        "['over', 'around', 'late', 8]",
        "['over', 'around', 'late', 7] ['over', 'around', 7]",
    ]
    assert not done.others


def test_where_it_cannot_be_put_there_the_others_stand_as_they_stood(sandbox: Sandbox) -> None:
    """The program holds the outer patch's wrapper, and would call it without the inner one."""
    sandbox.patch("around", code=NAMED)
    sandbox.patch("late", [STEP, WORK], code=NAMED, inside=["around"])
    sandbox.generate()
    done = sandbox.python(LATE.replace("step = Scheduler.step", "held = [Scheduler.step]"))
    assert done.out.splitlines() == ["['around', 7]", "['around', 7] [8]", "['around', 7]"]
    late = sandbox.reported("late")
    assert (late["state"], late["reason"]) == ("failed", "captured")
    assert sandbox.reported("around")["state"] == "applied"


def test_a_module_that_is_loaded_again(sandbox: Sandbox) -> None:
    sandbox.patch("a", code=NAMED, outside=["b"])
    sandbox.patch("b", code=NAMED)
    sandbox.generate()
    done = sandbox.python("""
        import importlib, fakeengine.scheduler
        importlib.reload(fakeengine.scheduler)
        print(fakeengine.scheduler.Scheduler().step(7))
    """)
    assert (done.out, done.others) == ("['a', 'b', 7]\n", [])


# Which is left out


def reported(sandbox: Sandbox, *names: str) -> list[tuple[str, str | None]]:
    found = {one["name"]: (one["state"], one["reason"]) for one in sandbox.report()["patches"]}
    return [found[name] for name in names]


def place_of(sandbox: Sandbox) -> list[str]:
    return ["--site-packages", str(sandbox.site), "--patch-dir", str(sandbox.patches), "--only"]


def judged(sandbox: Sandbox, cli: Cli, **environ: str) -> dict[str, tuple[str, str]]:
    """By patch, what both forms of `check` say of it: they agree."""
    question = ["check", "--json"]
    of_bundle = finish([PYTHON, sandbox.bundle, *question], sandbox.environ(path=[sandbox.site], **environ))
    found = [
        {one["name"]: one for one in json.loads(done.out)["patches"]}
        for done in (of_bundle, cli(*question, *place_of(sandbox)))
    ]
    assert found[0] == found[1]
    return {name: (one["reason"], one["detail"]) for name, one in found[0].items()}


def test_one_is_applied_instead_of_another(sandbox: Sandbox, cli: Cli) -> None:
    sandbox.patch("around")
    sandbox.patch("mine", code=NAMED, instead_of=["around"])
    sandbox.generate()
    done = sandbox.python(USE_STEP, LIVEPATCH="strict")
    assert (done.code, done.out, done.others) == (0, "['mine', 7]\n", [])
    assert reported(sandbox, "around", "mine") == [("skipped", "replaced"), ("applied", None)]
    detail = "mine is to be applied instead of it (LIVEPATCH_MINE=off ends that); fakeengine 1.0 has the fault"
    assert sandbox.reported("around")["detail"] == detail
    assert sandbox.reported("around")["verdict"] == "needed"
    assert judged(sandbox, cli)["around"] == ("replaced", detail)
    (row,) = [line for line in cli("check", *place_of(sandbox)).out.splitlines() if line.startswith("around ")]
    assert row.split() == ["around", "needed", "no", "mine", "instead", "of", "it"]


def test_until_all_of_its_modules_are_imported_neither_is_said_to_be_applied(sandbox: Sandbox) -> None:
    sandbox.write({"fakeengine/other.py": "def other(number): return number\n"}, sandbox.site)
    other = "fakeengine.other:other"
    sandbox.patch("around")
    sandbox.patch("mine", targets=[STEP, other], code=NAMED, instead_of=["around"])
    sandbox.generate()
    assert sandbox.python(USE_STEP, LIVEPATCH="strict").out == STOCK
    assert reported(sandbox, "around", "mine") == [("skipped", "replaced"), ("armed", None)]
    assert sandbox.reported("around")["detail"].startswith("mine is to be applied instead of it (")
    done = sandbox.python(f"import fakeengine.other\n{USE_STEP}", LIVEPATCH="strict")
    assert (done.code, done.out) == (0, "['mine', 7]\n")


def test_where_it_does_not_apply_the_other_does(sandbox: Sandbox) -> None:
    sandbox.patch("around", code=NAMED)
    sandbox.patch("mine", code=NAMED, instead_of=["around"])
    sandbox.generate()
    assert called(sandbox, LIVEPATCH_MINE="off") == ["around"]
    sandbox.patch("mine", code=NAMED, instead_of=["around"], variant=[])
    sandbox.generate()
    assert sandbox.python(USE_STEP).out == "['around', 7]\n"


def test_what_would_not_be_applied_either_is_said_once(sandbox: Sandbox) -> None:
    sandbox.patch("drifts", variant=[])
    sandbox.patch("mine", code="def wrappers(livepatch):\n    raise ValueError('no')", instead_of=["drifts", "nobody"])
    sandbox.generate()
    done = sandbox.python(USE_STEP)
    assert done.out == STOCK
    assert [line.split()[1] for line in done.others] == ["mine", "drifts"]


@pytest.mark.parametrize("name", ["after", "mine"])
def test_where_it_cannot_be_put_in_place_the_other_is_applied_after_all(sandbox: Sandbox, name: str) -> None:
    """Whichever of the two comes first by its name."""
    sandbox.patch("before", code=NAMED)
    sandbox.patch(name, code="def wrappers(livepatch):\n    raise ValueError('no')", instead_of=["before"])
    sandbox.generate()
    done = sandbox.python(USE_STEP)
    assert done.out == "['before', 7]\n"
    assert [line.partition(":")[2] for line in done.others] == [
        f" {name} is not applied (raised): ValueError while applying: no"
    ]


def test_what_is_left_out_leaves_nobody_out(sandbox: Sandbox, cli: Cli) -> None:
    sandbox.patch("a", code=NAMED, instead_of=["b"])
    sandbox.patch("b", code=NAMED, instead_of=["c"])
    sandbox.patch("c", code=NAMED)
    sandbox.generate()
    assert called(sandbox) == ["c", "a"]
    assert {name: one[0] for name, one in judged(sandbox, cli).items()} == {
        "a": "needed",
        "b": "replaced",
        "c": "needed",
    }


def test_asked_for_by_name_it_is_left_out_all_the_same(sandbox: Sandbox) -> None:
    """As `on` and `force` go: the variable of the patch that takes its place is what ends that."""
    sandbox.patch("around")
    sandbox.patch("mine", code=NAMED, instead_of=["around"])
    sandbox.generate()
    for toggle in ("on", "force"):
        assert called(sandbox, LIVEPATCH_AROUND=toggle) == ["mine"]


def test_nothing_is_left_out_where_there_is_nothing_to_apply(sandbox: Sandbox) -> None:
    fixed = {"releases": ["1.0"], "verdict": "fixed-upstream", "code": sandbox.fingerprints(STEP)}
    sandbox.patch("around", variant=[fixed])
    sandbox.patch("mine", code=NAMED, instead_of=["around"])
    sandbox.generate()
    called(sandbox)
    assert reported(sandbox, "around") == [("skipped", "fixed-upstream")]


def test_a_diff_instead_of_a_wrapper_and_of_a_diff(sandbox: Sandbox, cli: Cli) -> None:
    """The one that is left out does not find its code changed, and is no patch that a diff turns off."""
    file = "fakeengine/scheduler.py"
    sandbox.patch("around", code=NAMED)
    diff_patch(sandbox, {file: ("return [number]", "return ['first', number]")}, name="first")
    left_out = ["around", "first"]
    diff_patch(sandbox, {file: ("return [number]", "return ['mine', number]")}, name="mine", instead_of=left_out)
    sandbox.generate()
    assert called(sandbox) == ["mine"]
    assert reported(sandbox, *left_out) == [("skipped", "replaced")] * 2
    assert {name: one[0] for name, one in judged(sandbox, cli).items()} == {
        "around": "replaced",
        "first": "replaced",
        "mine": "needed",
    }
    assert called(sandbox, LIVEPATCH_MINE="off", LIVEPATCH_FIRST="off") == ["around"]


# What cannot be


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ({"a": {"inside": ["b"]}, "b": {"inside": ["a"]}}, "a and b are to stand inside of each other"),
        ({"a": {"outside": ["b"]}, "b": {"outside": ["a"]}}, "a and b are to stand inside of each other"),
        (
            {"a": {"inside": ["b"]}, "b": {"inside": ["c"]}, "c": {"inside": ["a"]}},
            "a, b and c are to stand inside of each other",
        ),
        ({"a": {"instead_of": ["b"]}, "b": {"instead_of": ["a"]}}, "a and b are to be applied instead of each other"),
    ],
)
def test_contradictions_are_refused_in_one_line(sandbox: Sandbox, cli: Cli, says: dict[str, Any], message: str) -> None:
    for name in "abc":
        sandbox.patch(name, about={}, **says.get(name, {}))
    place = ["--patch-dir", str(sandbox.patches)]
    refused = Done(2, "", f"vllm-livepatch: {message}, which cannot be\n")
    assert cli("generate", "--out", str(sandbox.bundle), *place) == refused
    assert not sandbox.bundle.exists()
    assert cli("check", "--site-packages", str(sandbox.site), "--only", *place) == refused
    assert cli("ready", str(sandbox.patches)) == refused
    assert "contradict" not in cli("list", *place).err


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"inside": ["a"]}, "inside names the patch itself"),
        ({"outside": ["some", "a"]}, "outside names the patch itself"),
        ({"instead_of": ["a"]}, "instead_of names the patch itself"),
        ({"inside": ["b"], "outside": ["c", "b"]}, "inside and outside both name b"),
        ({"inside": "b"}, "inside must be a list of texts"),
        ({"diff": "a.diff", "targets": ["engine.a"], "inside": ["b"]}, "a diff stands beneath all wrappers"),
        ({"about": {"instead_of": ["b"]}}, r"instead_of stands above \[about\]"),
    ],
)
def test_what_one_patch_cannot_say(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchError, match=f"^patch a: {message}"):
        patch("a", **facts)


def test_no_wrapper_goes_beneath_a_diff() -> None:
    changes = patch("changes", diff="a.diff", targets=["engine.a"])
    for key in ("inside", "instead_of"):
        why = order.contradiction([changes, patch("a", **{key: ["changes"]})])
        assert why == "a can be neither inside nor instead of changes: that is a diff, and diffs come first"
    assert order.contradiction([changes, patch("a", outside=["changes"])]) == ""
    assert order.contradiction([changes, patch("b", diff="b.diff", targets=["engine.a"], instead_of=["changes"])]) == ""


def test_names_have_either_form_and_may_be_nobodys() -> None:
    one, other = patch("one-more", inside=["an_other", "nobody"]), patch("an-other")
    assert one.order.inside == ("an-other", "nobody")
    assert order.outer([one, other]) == {"one-more": {"an-other"}, "an-other": frozenset()}
    assert order.contradiction([one, other]) == ""


def test_what_recipes_have_is_another_thing() -> None:
    assert patch("a", about={"replaces": [{"what": "a heredoc", "delete": "it"}]}).order == order.Order()


def test_ours_say_nothing_that_cannot_be() -> None:
    catalogue.go_together(catalogue.load().values())


@pytest.mark.parametrize("key", ["inside", "outside", "instead_of"])
def test_two_that_say_how_they_go_together_are_not_warned_of(sandbox: Sandbox, cli: Cli, key: str) -> None:
    says: dict[str, Any] = {key: ["second"]}
    sandbox.patch("first", **says)
    sandbox.patch("second")
    place = ["--patch-dir", str(sandbox.patches)]
    choice = ["--patch", "first", "--patch", "second"]
    assert cli("generate", "--out", str(sandbox.bundle), *choice, *place).err == ""
    sandbox.patch("third")
    warned = cli("generate", "--out", str(sandbox.bundle), *choice, "--patch", "third", *place).err
    assert f"first and second and third have one target, {STEP}" in warned


def test_ready_looks_at_ours_beside_a_folder(sandbox: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.patch("ours", inside=["mine"])
    sandbox.patch("mine", inside=["ours"])
    ours = catalogue.read(sandbox.patches / "ours")
    monkeypatch.setattr(catalogue, "load", lambda *_: {"ours": ours})
    done = cli("ready", str(Path(sandbox.patches, "mine")))
    assert (done.code, done.err) == (
        2,
        "vllm-livepatch: mine and ours are to stand inside of each other, which cannot be\n",
    )


def test_stock_where_neither_applies(sandbox: Sandbox) -> None:
    sandbox.patch("around")
    sandbox.patch("mine", code=NAMED, instead_of=["around"])
    sandbox.generate()
    assert sandbox.python(USE_STEP, LIVEPATCH="off").out == STOCK
