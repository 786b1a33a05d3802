"""A fork and an import at once: each waits until the other is done, and who does both waits for nobody."""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import threading
import traceback
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit import interpreters
from tests.unit.support import WORK, Sandbox

# By its name: it is no module in a patched process, and checked for types as what it is there.
finding: Any = importlib.import_module("vllm_livepatch.sitecustomize.finding")

ME = threading.get_ident()
OTHER = 7


class Hook:
    """A runtime that notes who counts as inside of it when it is asked; `pauses` are the waits, and who was then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[set[int]] = []
        self.pauses: list[set[int]] = []
        self.until = 2
        for name in ("inside", "forking", "finding"):
            monkeypatch.setattr(finding, name, set())
        self.load_hook = finding.load_hook
        monkeypatch.setattr(finding, "load_hook", lambda: SimpleNamespace(after=self.after))
        monkeypatch.setattr(finding, "sleep", self.sleep)

    def after(self, *arguments: Any) -> Any:
        self.seen.append(set(finding.inside))
        return arguments

    def sleep(self, seconds: float) -> None:
        self.pauses.append(set(finding.inside))
        if len(self.pauses) == self.until:
            finding.forking.discard(OTHER)
            finding.inside.discard(OTHER)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Hook:
    return Hook(monkeypatch)


def test_nobody_waits_where_nobody_forks(hook: Hook) -> None:
    assert finding.call_hook("after", 1) == (1,)
    assert (hook.seen, hook.pauses, finding.inside) == ([{ME}], [], set())


def test_an_import_waits_for_a_fork_and_does_not_hold_it_up(hook: Hook) -> None:
    finding.forking.add(OTHER)
    assert finding.call_hook("after", 1) == (1,)
    assert hook.pauses == [set(), set()]
    assert (hook.seen, finding.inside) == ([{ME}], set())


def test_an_import_within_an_import_waits_for_nobody(hook: Hook) -> None:
    finding.inside.add(ME)
    finding.forking.add(OTHER)
    finding.call_hook("after", 1)
    assert (hook.pauses, hook.seen, finding.inside) == ([], [{ME}], {ME})


def test_who_forks_may_import(hook: Hook) -> None:
    finding.forking.add(ME)
    finding.call_hook("after", 1)
    assert (hook.pauses, hook.seen) == ([], [{ME}])


def test_a_fork_waits_for_an_import_of_another_thread(hook: Hook) -> None:
    finding.inside.update({OTHER, ME})
    finding.before_fork()
    assert (len(hook.pauses), finding.forking) == (2, {ME})
    finding.after_fork()
    assert finding.forking == set()
    finding.inside.add(ME)  # it forks within an import
    finding.before_fork()
    assert len(hook.pauses) == 2


def test_waits_are_bounded(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "FORK_WAITS", 3)
    hook.until = 100
    finding.forking.add(OTHER)
    assert finding.call_hook("after", 1) == (1,)
    finding.inside.add(OTHER)
    finding.before_fork()
    assert len(hook.pauses) == 6


def test_in_the_child_only_the_thread_that_forked_is_left(hook: Hook) -> None:
    finding.inside.update({OTHER, ME})
    finding.forking.update({OTHER, ME})
    finding.finding.update({("a", OTHER), ("b", ME)})
    finding.after_fork_in_child()
    assert (finding.inside, finding.forking, finding.finding) == ({ME}, set(), {("b", ME)})


def test_forks_are_watched_from_the_first_target_on(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[dict[str, Any]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: registered.append(hooks))
    monkeypatch.setattr(finding, "fork_hooks", [])
    monkeypatch.setattr(finding, "TARGETS", {"engine.a": "watched"})
    monkeypatch.setattr(finding, "next_spec", lambda *search: None)
    assert finding.find_spec("engine.a", None, None) is None
    assert finding.find_spec("engine.a", None, None) is None
    (hooks,) = registered
    assert hooks == {
        "before": finding.before_fork,
        "after_in_parent": finding.after_fork,
        "after_in_child": finding.after_fork_in_child,
    }
    assert finding.finding == set()


def test_a_finder_behind_us_that_asks_all_finders_is_answered(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "TARGETS", {"engine.a": "watched"})
    monkeypatch.setattr(finding, "fork_hooks", [True])
    asked: list[Any] = []
    monkeypatch.setattr(finding, "next_spec", lambda *search: asked.append(finding.find_spec(*search)))
    finding.find_spec("engine.a", None, None)
    assert asked == [None]


def test_each_wait_is_a_millisecond_and_ends_as_soon_as_it_may(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """FORK_WAITS counts milliseconds; a condition is looked at once where it holds at once."""
    looks: list[str] = []
    pauses: list[float] = []

    class Looked(set[int]):
        def __sub__(self, other: Any) -> Any:
            looks.append("look")
            return super().__sub__(other)

    monkeypatch.setattr(finding, "sleep", pauses.append)
    monkeypatch.setattr(finding, "forking", Looked())
    finding.call_hook("after", 1)
    assert looks == ["look"]
    monkeypatch.setattr(finding, "inside", Looked())
    finding.before_fork()
    assert (looks, pauses) == (["look", "look"], [])
    monkeypatch.setattr(finding, "FORK_WAITS", 2)
    finding.inside.add(OTHER)
    finding.before_fork()
    finding.after_fork()
    finding.forking.add(OTHER)
    finding.call_hook("after", 1)
    assert pauses == [0.001] * 4


def test_in_the_child_what_another_thread_imported_is_imported_anew(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "TARGETS", {"engine.a": "watched", "ours": "own"})
    owners = {
        **dict.fromkeys(("engine.a", "ours.b", "json.decoder", "engine", "engine.b", "app"), OTHER),
        "ours.mine": ME,
        "ours.nobodys": None,
    }
    locks: dict[str, Any] = {
        **{name: partial(SimpleNamespace, owner=owner) for name, owner in owners.items()},
        "ours.gone": lambda: None,  # a weak reference, whose lock is no more
    }
    names, stay = list(locks), list(locks)[3:]
    monkeypatch.setattr(sys.modules["_frozen_importlib"], "_module_locks", locks)
    for name in locks:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    finding.after_fork_in_child()
    assert list(locks) == stay
    assert [name for name in names if name in sys.modules] == stay


HALF_IMPORTED = """
import os, sys, threading, typing
from fakeengine.scheduler import Scheduler
sys.ready, sys.go = threading.Event(), threading.Event()
thread = threading.Thread(target=__import__, args=["application"])
thread.start()
sys.ready.wait()
child = os.fork()
if not child:
    assert typing.get_type_hints(sys.shared) == {"other": sys.modules["application"].Other}
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.go.set()
thread.join()
"""


def test_in_the_child_a_half_imported_module_of_others_stays(patched: Sandbox) -> None:
    """Of a program whose import serves: its classes' names are looked for in `sys.modules`."""
    application = """\
        import sys

        class Shared:
            other: "Other"

        class Other: ...

        sys.shared = Shared
        sys.ready.set()
        sys.go.wait()
        """
    patched.write({"application.py": application})
    done = patched.python(HALF_IMPORTED)
    assert (done.code, done.out) == (0, "0\n"), done.err


# A target that is imported where the program's stack is nearly full.
DEEP = """
import sys
def deep(left):
    if left:
        return deep(left - 1)
    import fakeengine.scheduler
    return fakeengine.scheduler.Scheduler().step(7)
import fakeengine
left = sys.getrecursionlimit()
while True:
    left -= 5
    try:
        found = deep(left)
        break
    except RecursionError:
        pass
import fakeengine.worker
print(found, fakeengine.worker.work(8), sys.getrecursionlimit())
"""


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_a_full_stack_is_no_damage(sandbox: Sandbox, version: str) -> None:
    sandbox.patch()
    sandbox.patch("later", [WORK])
    sandbox.generate()
    python = str(interpreters.find(version))
    for given in ({}, {"LIVEPATCH": "strict"}):
        done = sandbox.python(DEEP, python=python, **given)
        assert (done.code, done.out) == (0, "['patched', 7] ['patched', 8] 1000\n"), done.err
        assert done.others == []


def test_an_error_of_a_stack_that_is_full_all_the_same_is_no_damage(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another thread has put the limit back."""
    real = builtins.__import__

    def full(name: str, *rest: Any) -> Any:
        if name == "_vllm_livepatch.sitecustomize":
            raise RecursionError("maximum recursion depth exceeded")
        return real(name, *rest)

    monkeypatch.setattr(finding, "load_hook", hook.load_hook)
    monkeypatch.setattr(finding, "TARGETS", {"engine.a": "watched"})
    monkeypatch.setattr(builtins, "__import__", full)
    assert finding.call_hook("before", "engine.a", None, None) is None
    assert (finding.damages, finding.TARGETS) == ([], {"engine.a": "watched"})


class LivepatchFinder:
    """As the entry's is called."""

    found: list[str]

    @staticmethod
    def find_spec(*search: Any) -> None:
        LivepatchFinder.found.append("ours")


class Asked:
    def __init__(self, name: str, found: list[str], answer: Any = None) -> None:
        self.name, self.found, self.answer = name, found, answer

    def find_spec(self, *search: Any) -> Any:
        self.found.append(self.name)
        return self.answer


@pytest.mark.parametrize(
    ("finders", "asked"),
    [
        (["a", "ours", "b", "c"], ["b", "c"]),
        (["ours", "b", "ours", "c"], ["b", "ours", "c"]),
        (["a", "b"], ["a", "b"]),
        (["ours", "b", "knows", "c"], ["b", "knows"]),
    ],
    ids=["behind ours", "behind the first of two", "somebody put something around ours", "to the first that knows it"],
)
def test_the_finders_that_are_asked(monkeypatch: pytest.MonkeyPatch, finders: list[str], asked: list[str]) -> None:
    LivepatchFinder.found = found = list[str]()
    made = [LivepatchFinder if one == "ours" else Asked(one, found, one if one == "knows" else None) for one in finders]
    monkeypatch.setattr(sys, "meta_path", made)
    assert finding.next_spec("engine.a", None, None) == ("knows" if "knows" in finders else None)
    assert found == asked


class Plain:
    def __init__(self) -> None:
        self.path = "/there"

    def exec_module(self, module: Any) -> None:
        module.ran = self.path


class Slotted:
    __slots__ = ("path",)

    def __init__(self) -> None:
        self.path = "/there"

    def exec_module(self, module: Any) -> None:
        module.ran = self.path


class Copies(Plain):
    def __copy__(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(("kind", "copied"), [(Plain, True), (Slotted, False), (Copies, False)])
def test_a_loader_is_copied_where_its_attributes_make_a_copy(
    monkeypatch: pytest.MonkeyPatch, kind: type[Any], copied: bool
) -> None:
    monkeypatch.setattr(finding, "load_hook", lambda: None)
    loader = kind()
    made = finding.notifying("engine.a", loader)
    assert made is not loader
    assert type(made) is (kind if copied else finding.StandIn)
    assert made.path == "/there"
    module = ModuleType("engine.a")
    made.exec_module(module)
    assert module.ran == "/there"


class Given:
    """A loader of the kind that Python has given up."""

    def load_module(self, fullname: str) -> Any:
        raise LookupError(fullname)


def cut_out(error: BaseException) -> set[tuple[str, str]]:
    """The frames of finding.py in a traceback that the interpreter does not cut out of it."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [(code.co_name, code.co_filename) for code in frames if code.co_name != "call_hook"]
    return {one for one in ours if one[1] == finding.__file__}


def test_frames_of_ours_are_part_of_the_import_machinery(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module, or its loader, raises: the traceback shows no line of ours between the import and it."""

    def raises(self: Any, module: Any) -> None:
        raise LookupError(module)

    monkeypatch.setattr(Plain, "exec_module", raises)
    monkeypatch.setattr(finding, "load_hook", lambda: SimpleNamespace(added=lambda name: None, before=lambda *a: None))
    added = finding.Added("engine.b")
    spec = SimpleNamespace(loader=added)
    module: Any = SimpleNamespace(__spec__=spec)
    calls = [
        (finding.notifying("engine.a", Plain()).exec_module, module, LookupError),
        (finding.notifying("engine.a", Given()).load_module, "engine.a", LookupError),
        (added.create_module, spec, ModuleNotFoundError),
        (added.exec_module, module, ModuleNotFoundError),
    ]
    for call, argument, kind in calls:
        with pytest.raises(kind) as caught:
            call(argument)
        assert cut_out(caught.value) == set(), call


class Refusing:
    """A stderr without a file."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def fileno(self) -> int:
        raise self.error


@pytest.mark.parametrize(
    "stderr", [None, Refusing(OSError()), Refusing(ValueError())], ids=["none", "no file", "closed"]
)
def test_a_damaged_bundle_in_a_process_without_a_stderr(monkeypatch: pytest.MonkeyPatch, stderr: Any) -> None:
    """There is no bundle here: the runtime cannot be imported."""
    monkeypatch.setattr(finding, "damages", [])
    monkeypatch.setattr(finding, "TARGETS", {"engine.a": "watched"})
    monkeypatch.setattr(sys, "stderr", stderr)
    assert finding.load_hook() is None
    assert (len(finding.damages), finding.TARGETS) == (1, {})


def test_of_two_threads_that_find_it_damaged_one_writes_the_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Targets(dict[str, str]):
        def clear(self) -> None:
            finding.damages.append(ImportError("of the other thread"))

    monkeypatch.setattr(finding, "damages", [])
    monkeypatch.setattr(finding, "TARGETS", Targets())
    assert finding.load_hook() is None
    assert (len(finding.damages), capfd.readouterr().err) == (2, "")


def test_to_look_for_a_target_imports_nothing(patched: Sandbox) -> None:
    """Python holds its global import lock meanwhile."""
    done = patched.python("""
        import fakeengine, sys
        sys.modules.pop("typing", None)  # some interpreters' site has it
        before = set(sys.modules)
        spec = sys.meta_path[0].find_spec("fakeengine.scheduler", fakeengine.__path__)
        print(spec is not None, sorted(set(sys.modules) - before))
        """)
    assert done.out == "True []\n"
