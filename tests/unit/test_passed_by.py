"""Targets that are loaded past us, or replaced while they are imported: said, and under strict the end."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest
from vllm_livepatch.sitecustomize import wrapping

from tests.unit import interpreters
from tests.unit.support import PASTED_LOADER, PATCHED, PYTHON, STEP, STOCK, USE_STEP, WORK, Sandbox, finish
from tests.unit.test_executed_text import OVERLAY, overlay, redirects

IN_FRONT = """
import sys
from importlib.machinery import PathFinder
class InFront:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, path) if name in NAMES else None
sys.meta_path.insert(0, InFront)
"""
BY_HAND = """
import sys, types
sys.modules["fakeengine.scheduler"] = module = types.ModuleType("fakeengine.scheduler")
exec("class Scheduler:\\n    def step(self, number):\\n        return [number]", vars(module))
"""
BY_RECIPE = """
import importlib.util, sys
from importlib.machinery import PathFinder
import fakeengine
spec = PathFinder.find_spec("fakeengine.scheduler", fakeengine.__path__)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
"""
WAYS = {
    "a finder in front of ours": f"NAMES = 'fakeengine.scheduler'\n{IN_FRONT}import fakeengine.scheduler\n",
    "by hand": BY_HAND,
    "by the recipe": BY_RECIPE,
    "a lazy loader past us": BY_RECIPE.replace(
        "module = ", "spec.loader = importlib.util.LazyLoader(spec.loader)\nmodule = "
    )
    + "module.Scheduler\n",
}
OTHER_TARGET = "import fakeengine.worker\n"


def two(sandbox: Sandbox, **facts: object) -> None:
    """`around` on the scheduler, `other` on the worker."""
    sandbox.patch(**facts)  # type: ignore[arg-type]
    sandbox.patch("other", [WORK])
    sandbox.generate()


def bypassed(sandbox: Sandbox, name: str = "around") -> str:
    """The detail of a patch that failed as bypassed."""
    reported = sandbox.reported(name)
    assert (reported["state"], reported["reason"]) == ("failed", "bypassed"), reported
    return str(reported["detail"])


@pytest.mark.parametrize("way", list(WAYS))
def test_a_target_that_came_past_us_has_failed_and_ends_a_strict_process(sandbox: Sandbox, way: str) -> None:
    two(sandbox)
    code = f"{WAYS[way]}{OTHER_TARGET}{USE_STEP}"
    done = sandbox.python(code)
    assert (done.code, done.out) == (0, STOCK), done.err
    assert bypassed(sandbox).startswith("fakeengine.scheduler was put into sys.modules ")
    assert sandbox.reported("other")["state"] == "applied"
    (line,) = done.others
    assert line.startswith("vllm-livepatch: around is not applied (bypassed): fakeengine.scheduler was put ")
    done = sandbox.python(code, LIVEPATCH="strict")
    assert (done.code, done.out) == (78, ""), done.err
    assert done.lines[-1].startswith("vllm-livepatch: LIVEPATCH=strict: around is not applied (bypassed): ")


@pytest.mark.parametrize("way", list(WAYS))
def test_a_target_that_comes_past_us_when_the_process_serves_has_failed_and_ends_nothing(
    sandbox: Sandbox, way: str
) -> None:
    """Nothing is imported after it: what looks is the report."""
    two(sandbox)
    done = sandbox.python(f"{OTHER_TARGET}import importlib.util, types\n{WAYS[way]}", LIVEPATCH="strict")
    if way != "a finder in front of ours":  # which our own sees at the end of that import
        assert done.code == 0, done.err
    assert bypassed(sandbox)
    assert any("around is not applied (bypassed): fakeengine.scheduler was put" in line for line in done.lines)


def test_a_finder_in_front_of_ours_takes_all_targets(patched: Sandbox) -> None:
    """Then no target brings the runtime into the process: whatever is imported next does."""
    code = (
        f"NAMES = 'fakeengine.scheduler'\n{IN_FRONT}import fakeengine.scheduler\nimport fakeengine.worker\n{USE_STEP}"
    )
    done = patched.python(code)
    assert (done.code, done.out) == (0, STOCK), done.err
    assert bypassed(patched)
    assert patched.python(code, LIVEPATCH="strict").code == 78


def test_a_finder_in_front_of_ours_that_takes_no_target_loads_nothing(patched: Sandbox) -> None:
    done = patched.python(
        f"NAMES = ''\n{IN_FRONT}import fakeengine.worker\nprint([m for m in sys.modules if 'livepatch' in m])"
    )
    assert (done.code, done.out, done.err) == (0, "[]\n", "")
    assert patched.reports() == []


def test_with_a_finder_in_front_of_ours_an_import_that_fails_is_not_looked_at(patched: Sandbox) -> None:
    """Code may try it in each call. One that leaves a module, or executes a target anew, is."""
    done = patched.python(
        f"import fakeengine.scheduler\nNAMES = ''\n{IN_FRONT}"
        """
from _vllm_livepatch.sitecustomize.runtime import Runtime
looks, look = [], Runtime.look
Runtime.look = lambda runtime, importing: (looks.append(1) if importing else None, look(runtime, importing))
def count(step):
    looks.clear()
    step()
    return len(looks)
def fails():
    for _ in range(3):
        try:
            import fakeengine.nothing
        except ImportError:
            pass
def imports():
    import fakeengine.worker
import importlib
print(count(fails), count(imports), count(lambda: importlib.reload(fakeengine.scheduler)), count(fails))
"""
    )
    assert (done.code, done.out) == (0, "0 1 1 0\n"), done.err


@pytest.mark.parametrize("toggle", ["off", "optional", "not needed"])
def test_a_patch_that_nobody_wants_is_not_bypassed(sandbox: Sandbox, toggle: str) -> None:
    facts = {"auto": "off"} if toggle == "optional" else {}
    if toggle == "not needed":
        code = sandbox.fingerprints(STEP)
        facts = {"variant": [{"releases": ["1.0"], "code": code, "verdict": "fixed-upstream"}]}  # type: ignore[dict-item]
    two(sandbox, **facts)
    environ = {"LIVEPATCH_AROUND": "off"} if toggle == "off" else {}
    done = sandbox.python(f"{WAYS['by the recipe']}{OTHER_TARGET}{USE_STEP}", LIVEPATCH="strict", **environ)
    assert (done.code, done.out, done.others) == (0, STOCK, []), done.err
    assert sandbox.reported()["state"] == "skipped"


@pytest.mark.parametrize("per_module", [False, True])
def test_one_of_two_targets_came_past_us(sandbox: Sandbox, per_module: bool) -> None:
    """All or nothing, also where the other one was patched already."""
    sandbox.patch(targets=[STEP, WORK], per_module=per_module)
    sandbox.write({"fakeengine/all.py": "import fakeengine.worker, fakeengine.scheduler\n"})
    sandbox.generate()
    code = (
        f"NAMES = 'fakeengine.scheduler'\n{IN_FRONT}import fakeengine.all\n{USE_STEP}\nprint(fakeengine.worker.work(8))"
    )
    done = sandbox.python(code)
    assert (done.code, done.out) == (0, f"{STOCK}[8]\n"), done.err
    assert bypassed(sandbox)
    assert sandbox.python(code, LIVEPATCH="strict").code == 78


PROGRAM = {
    "fakeengine/server.py": """\
        class Server:
            def serve(self):
                return "stock"

        if __name__ == "__main__":
            print(Server().serve(), flush=True)
        """
}


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_a_target_that_runs_as_the_program(sandbox: Sandbox, version: str) -> None:
    """No target is imported: the program itself is one."""
    sandbox.write(PROGRAM)
    sandbox.patch(targets=["fakeengine.server:Server.serve"])
    sandbox.generate()
    python = interpreters.find(version) or PYTHON
    command = [python, "-m", "fakeengine.server"]
    done = finish(command, sandbox.environ())
    assert (done.code, done.out) == (0, "stock\n"), done.err
    assert bypassed(sandbox).startswith("fakeengine.server runs as the program (python -m); ")
    assert len(done.others) == 1
    done = finish(command, sandbox.environ(LIVEPATCH="strict"))
    assert (done.code, done.out) == (78, ""), done.err
    done = finish(command, sandbox.environ(LIVEPATCH_AROUND="off"))
    assert (done.code, done.out, done.others) == (0, "stock\n", []), done.err


def test_a_program_beside_its_targets_is_none(patched: Sandbox) -> None:
    patched.write({"fakeengine/program.py": f"{USE_STEP}\n"})
    done = finish([PYTHON, "-m", "fakeengine.program"], patched.environ(LIVEPATCH="strict"))
    assert (done.code, done.out, done.others) == (0, PATCHED, []), done.err


# A finder of somebody's that asks the others, and replaces a function when their loader has run, as the recipes that
# people paste into their start scripts do.
PASTED_STEP = """
def pasted(module):
    module.Scheduler.step = lambda self, number: ["pasted", number]
"""
REPLACES = (
    f"{PASTED_LOADER}{PASTED_STEP}"
    + """
import importlib.util, sys
class Finder:
    asking = False
    def find_spec(self, name, path=None, target=None):
        if name == "fakeengine.scheduler" and not self.asking:
            self.asking = True
            spec = importlib.util.find_spec(name)
            spec.loader = Loader(spec.loader)
            return spec
sys.meta_path.insert(0, Finder())
"""
)


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "within another import"])
@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_a_target_that_is_replaced_while_it_is_imported(patched: Sandbox, version: str, nested: bool) -> None:
    patched.write({"fakeengine/outer.py": "from fakeengine.scheduler import Scheduler\n"})
    use = USE_STEP.replace("fakeengine.scheduler", "fakeengine.outer") if nested else USE_STEP
    python = str(interpreters.find(version))
    done = patched.python(f"{REPLACES}{use}", python=python)
    assert (done.code, done.out) == (0, "['pasted', 7]\n"), done.err
    assert (patched.reported()["state"], patched.reported()["reason"]) == ("failed", "overwritten")
    assert sum("(overwritten)" in line for line in done.others) == 1
    done = patched.python(f"{REPLACES}{use}", python=python, LIVEPATCH="strict")
    assert (done.code, done.out) == (78, ""), done.err


def test_a_target_that_is_replaced_later_ends_nothing(patched: Sandbox) -> None:
    """Also where another import of a target ends after that."""
    code = f"{USE_STEP}; Scheduler.step = None\ndel sys.modules['fakeengine._version']\nimport fakeengine.outer"
    patched.write({"fakeengine/outer.py": ""})
    done = patched.python(f"import sys, fakeengine._version\n{REPLACES.split('class')[0]}{code}", LIVEPATCH="strict")
    assert (done.code, done.out) == (0, PATCHED), done.err


def test_a_lazy_loader_of_a_finder_behind_ours(patched: Sandbox) -> None:
    """It runs the module when that is used: by way of us."""
    file = patched.site / "fakeengine/scheduler.py"
    lazy = redirects(file).replace("loader=SourceFileLoader", "loader=LazyLoader(SourceFileLoader").replace("))", ")))")
    done = patched.python(f"from importlib.util import LazyLoader\n{lazy}{USE_STEP}", LIVEPATCH="strict")
    assert (done.code, done.out) == (0, PATCHED), done.err
    assert patched.reported()["state"] == "applied"
    lazy = lazy.replace(str(file), str(overlay(patched)))
    done = patched.python(f"from importlib.util import LazyLoader\n{lazy}{USE_STEP}")
    assert done.out == OVERLAY
    assert any("(drifted)" in line for line in done.others)


def test_a_module_that_puts_another_in_its_place(sandbox: Sandbox) -> None:
    """What importers get is not what was executed."""
    source = (sandbox.site / "fakeengine/scheduler.py").read_text()
    own = "import sys, types\nsys.modules[__name__] = other = types.ModuleType(__name__)\nother.Scheduler = Scheduler\n"
    sandbox.write({"fakeengine/scheduler.py": source + own})
    sandbox.patch()
    sandbox.generate()
    done = sandbox.python(USE_STEP)
    assert (done.code, done.out) == (0, STOCK), done.err
    assert bypassed(sandbox)
    assert sandbox.python(USE_STEP, LIVEPATCH="strict").code == 78


@pytest.mark.parametrize("shape", ["plain", "before", "shortcut"])
def test_a_module_that_is_put_back_is_the_one_that_was_patched(sandbox: Sandbox, shape: str) -> None:
    """As `mock.patch.dict(sys.modules)` does it, after another import of the same module in between."""
    look = "def look(*args): livepatch.count('calls')"
    code = {
        "plain": "return {TARGETS[0]: lambda wrapped, instance, args, kwargs: ['patched', *wrapped(*args, **kwargs)]}",
        "before": "return {TARGETS[0]: livepatch.before(look)}",
        "shortcut": "return {TARGETS[0]: livepatch.shortcut(lambda release, guarded: lambda *args: guarded(*args), livepatch.before(look))}",
    }[shape]
    two(sandbox, code=f"def wrappers(livepatch):\n    {look}\n    {code}\n")
    out = PATCHED if shape == "plain" else STOCK
    program = f"""
        import sys
        {USE_STEP}
        kept = sys.modules.pop("fakeengine.scheduler")
        {USE_STEP}
        sys.modules["fakeengine.scheduler"] = kept
        {USE_STEP}
        import fakeengine.worker
        {USE_STEP}
        """
    done = sandbox.python(program, LIVEPATCH="strict")
    assert (done.code, done.out, done.others) == (0, out * 4, []), done.err
    assert [(sandbox.reported(name)["state"], sandbox.reported(name)["reason"]) for name in ("around", "other")] == [
        ("applied", None)
    ] * 2
    done = sandbox.python(f"{dedent(program)}kept.Scheduler.step = lambda self, number: [number]\n")
    assert "no longer applied (overwritten)" in done.err


def test_what_only_passes_for_a_module_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine_odd", object())
    assert wrapping.passed_by("engine_odd") == "was put into sys.modules without a loader, past the bundle's finder"
    assert wrapping.passed_by("engine_absent") is None
