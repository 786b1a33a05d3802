"""Who takes a target while modules are imported, by the sources: as a process finds it in memory."""

from __future__ import annotations

import json

import pytest
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools.compatibility import taken

from tests.unit.support import PATCHED, STEP, STOCK, USE_STEP, WORK, Cli, Sandbox
from tests.unit.test_captures import ALIASES, CAPTURES, NO_CALLS, SCHEDULER, SOURCE, TARGETS, ready


def holders(sandbox: Sandbox, name: str = "around") -> list[taken.Holder]:
    entries = sandbox.entries()
    return taken.holders([entries[name].patch], Tree([str(sandbox.site)]))[name]


@pytest.mark.parametrize(("taken_", "call", "holder"), CAPTURES.values(), ids=CAPTURES)
def test_what_a_process_refuses_is_found(sandbox: Sandbox, taken_: str, call: str, holder: str) -> None:
    ready(sandbox, "", taken_)
    found = holders(sandbox)
    what = next(kind for kind, (one, _, _) in CAPTURES.items() if one == taken_)
    line = SOURCE.replace("{body}", "").partition("{taken}")[0].count("\n") + 1
    if what == "bound method":  # of an object, of which a text does not say the class
        assert found == []
        return
    (one,) = found
    assert (one.covered, one.certain, one.module) == (False, True, SCHEDULER), one
    assert one.line >= line


@pytest.mark.parametrize(("body", "taken_", "call", "word"), ALIASES.values(), ids=ALIASES)
def test_another_name_is_covered(sandbox: Sandbox, body: str, taken_: str, call: str, word: str) -> None:
    ready(sandbox, body, taken_)
    (one,) = holders(sandbox)
    assert (one.covered, one.certain) == (True, True), one
    assert one.how.startswith("another name, ")


@pytest.mark.parametrize("taken_", NO_CALLS.values(), ids=NO_CALLS)
def test_what_holds_nothing_is_not_found(sandbox: Sandbox, taken_: str) -> None:
    ready(sandbox, "", taken_)
    kinds = {"TABLE = weakref", "known(work)", "TABLE = [work]; TABLE.clear()"}  # by the source, nobody can tell
    refuse = [one for one in holders(sandbox) if not one.covered]
    assert refuse == [] or any(kind in taken_ for kind in kinds)


ROUTER = """
class Router:
    def __init__(self): self.kept = {}
    def post(self, path):
        def decorator(function):
            self.kept[path] = function
            return function
        return decorator
    def mark(self, path): return lambda function: function
router = Router()
"""


def test_a_route_keeps_its_function(sandbox: Sandbox, cli: Cli) -> None:
    """As vLLM's API servers have them: what a route calls can be wrapped."""
    routes = "@router.post('/a')\ndef held(): return 1\n@router.mark('/b')\ndef free(): return 1\n"
    sandbox.write({"fakeengine/routes.py": ROUTER + routes})
    for name in ("held", "free"):
        sandbox.patch(name, [f"fakeengine.routes:{name}"], variant=[])
        assert cli("lock", str(sandbox.patches / name), "--site-packages", str(sandbox.site)).code == 0
    (one,) = holders(sandbox, "held")
    assert (one.how, one.covered, one.certain) == ("a route of router.post", False, True)
    assert holders(sandbox, "free") == []
    done = cli("check", "--patch-dir", str(sandbox.patches), "--only", "--site-packages", str(sandbox.site))
    assert done.code == 1
    assert f"fakeengine.routes:{one.line} has fakeengine.routes:held as a route of router.post and would" in done.out
    sandbox.generate()
    sandbox.python("import fakeengine.routes")
    assert [sandbox.reported(name)["reason"] for name in ("held", "free")] == ["captured", None]


OTHER = {
    "from fakeengine.scheduler import work as w\nTABLE = {'x': w}": ("an entry of a dict", False),
    "from . import scheduler\nrun = scheduler.work": ("another name, run", True),
    "import fakeengine.scheduler\nlist(map(fakeengine.scheduler.work, []))": ("an argument of map", False),
    "from .scheduler import Scheduler\nregister(op_func=Scheduler.step)": ("an argument of register, op_func=", False),
    "from fakeengine.scheduler import Scheduler as S\ndef f(*, g=S.step): ...": ("a default argument of f", False),
    "if True:\n    from fakeengine.scheduler import work": ("another name, work", True),
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fakeengine.scheduler import work": None,
    "def f():\n    from fakeengine.scheduler import work\n    return [work]": None,
    "from fakeengine.scheduler import Scheduler\nclass Own(Scheduler):\n    def step(self): return Scheduler.step(self)": None,
    "work = 1\nTABLE = [work]": None,
}


@pytest.mark.parametrize("text", OTHER)
def test_another_module_counts_where_it_may_come_before_the_last_of_the_patchs(sandbox: Sandbox, text: str) -> None:
    sandbox.write({"fakeengine/other.py": text})
    ready(sandbox, "", "")
    found = [(one.how, one.covered) for one in holders(sandbox)]
    wanted = OTHER[text]
    assert (wanted in found) if wanted is not None else (found == [])
    assert not any(one.certain for one in holders(sandbox))
    sandbox.patch(targets=TARGETS)  # of one module: it is there before anybody else can take it
    assert holders(sandbox) == []
    sandbox.patch(targets=[*TARGETS, WORK], per_module=True)
    assert holders(sandbox) == []


def test_a_file_that_is_no_python_is_passed_by(sandbox: Sandbox) -> None:
    ready(sandbox, "", "")
    (sandbox.site / "fakeengine/odd.py").write_bytes(b"Scheduler.step = work \xff (")
    sandbox.write({"fakeengine/broken.py": "from fakeengine.scheduler import work as (\n"})
    assert holders(sandbox) == []


def test_check_names_the_holder_and_fails_as_a_process_does(sandbox: Sandbox, cli: Cli) -> None:
    """Needed, and it could not apply."""
    engine = sandbox.site / "fakeengine/scheduler.py"
    engine.write_text(engine.read_text() + "TABLE = {'x': Scheduler.step}\n")
    sandbox.patch()
    sandbox.generate()
    assert sandbox.python(USE_STEP).out == STOCK
    assert sandbox.reported()["reason"] == "captured"
    asked = ("check", "--patch-dir", str(sandbox.patches), "--site-packages", str(sandbox.site))
    done = cli(*asked)
    line = f"around: a process refuses it (captured): {SCHEDULER}:7 has {STEP} as an entry of a dict and would call it unpatched"
    assert line in done.out
    assert done.code == 1
    (one,) = [patch for patch in json.loads(cli(*asked, "--json").out)["patches"] if patch["name"] == "around"]
    assert one["held"] == [
        {"target": STEP, "module": SCHEDULER, "line": 7, "how": "an entry of a dict", "covered": False, "certain": True}
    ]
    engine.write_text(engine.read_text().replace("TABLE = {'x': Scheduler.step}", "step = Scheduler.step"))
    sandbox.patch()
    sandbox.generate()
    done = cli(*asked)
    assert (done.code, "captured" in done.out) == (0, False)
    assert sandbox.python(USE_STEP).out == PATCHED
