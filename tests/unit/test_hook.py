"""A patched module looks as a reader expects: loader, spec, source, resources, tracebacks; and every way to import it."""

from __future__ import annotations

import pytest

from tests.unit import interpreters
from tests.unit.support import PATCHED, STEP, STOCK, USE_STEP, Done, Sandbox

SERVED = interpreters.each(interpreters.SERVED)


def both(sandbox: Sandbox, code: str, *flags: str, python: str | None = None) -> Done:
    """Code whose output, exit code and stderr (but for our one line) are the same without the bundle."""
    more = {"python": python} if python else {}
    bare, armed = sandbox.bare(code, *flags, **more), sandbox.python(code, *flags, **more)
    assert (armed.code, armed.out, armed.others) == (bare.code, bare.out, bare.lines)
    return armed


def test_loader_spec_and_source_are_what_they_are_without(patched: Sandbox) -> None:
    done = both(
        patched,
        """
        import importlib.util, inspect, linecache, pkgutil, sys
        import fakeengine.scheduler as module
        loader, spec = module.__loader__, module.__spec__
        print(type(loader), loader.name, loader.path, loader is spec.loader, sorted(vars(loader)))
        print(spec.name, spec.origin, spec.cached, spec.has_location, spec.parent, spec.submodule_search_locations)
        print(module.__name__, module.__file__, module.__package__, module.__cached__, sorted(vars(module)))
        print(loader.get_source(module.__name__) == open(module.__file__).read(), loader.get_filename(), loader.is_package(module.__name__))
        print(loader.get_code(module.__name__).co_filename, loader.get_data(module.__file__)[:20], repr(loader)[:45], repr(module))
        print(inspect.getsource(module), inspect.getsource(module.Scheduler), inspect.getsource(module.Scheduler.step))
        print(inspect.getfile(module.Scheduler), inspect.getsourcelines(module.Scheduler.step)[1], inspect.getdoc(module))
        print(inspect.signature(module.Scheduler.step), inspect.unwrap(module.Scheduler.step).__code__.co_filename)
        print(module.Scheduler.step.__name__, module.Scheduler.step.__qualname__, module.Scheduler.step.__module__)
        print(importlib.util.find_spec("fakeengine.scheduler") is spec, [name for _, name, _ in pkgutil.iter_modules(sys.modules["fakeengine"].__path__)])
        """,
    )
    assert "SourceFileLoader" in done.out
    assert patched.reported()["state"] == "applied"


def test_a_spec_can_be_looked_for_and_the_module_made_of_it_by_hand(patched: Sandbox) -> None:
    """The private copy is nobody's `fakeengine.scheduler`; the one in sys.modules is."""
    code = """
        import importlib.util, sys
        spec = importlib.util.find_spec("fakeengine.scheduler")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        spec.loader.exec_module(module)
        print(module.Scheduler().step(1), "fakeengine.scheduler" in sys.modules)
        print(type(spec.loader).__name__, sorted(vars(spec.loader)))
        """
    done = both(patched, code)
    assert done.out.startswith("[1] False\n")
    code += "sys.modules[spec.name] = module\n        spec.loader.exec_module(module)"  # without us, for everybody
    (line,) = patched.python(code).others
    assert line.startswith(
        "vllm-livepatch: around is not applied (bypassed): fakeengine.scheduler was put into sys.mod"
    )
    done = patched.python(f"import importlib.util\nimportlib.util.find_spec('fakeengine.scheduler')\n{USE_STEP}")
    assert (done.out, len(done.lines)) == (PATCHED, 1)


def test_reload_applies_once_more(patched: Sandbox) -> None:
    done = patched.python("""
        import importlib, fakeengine.scheduler as module
        for _ in range(3):
            print(module.Scheduler().step(7))
            assert importlib.reload(module) is module
        print(module.Scheduler().step(7))
        """)
    assert done.out == PATCHED * 4
    assert patched.reported()["state"] == "applied"
    assert len(done.lines) == 1


def test_a_module_that_is_dropped_and_imported_anew(patched: Sandbox) -> None:
    done = patched.python(f"import sys\n{USE_STEP}\ndel sys.modules['fakeengine.scheduler']\n{USE_STEP}")
    assert done.out == PATCHED * 2
    assert patched.reported()["state"] == "applied"


def test_reload_of_one_of_two_targets_keeps_the_other_as_it_is(sandbox: Sandbox) -> None:
    sandbox.patch(targets=[STEP, "fakeengine.worker:work"])
    sandbox.generate()
    code = """
        import importlib, fakeengine.scheduler as scheduler, fakeengine.worker as worker
        {before}
        importlib.reload(worker)
        print(scheduler.Scheduler().step(7), worker.work(8))
        """
    done = sandbox.python(code.format(before=""))
    assert done.out == "['patched', 7] ['patched', 8]\n"
    # Somebody else's wrapper around ours does not make ours another one's.
    wrap = "ours = scheduler.Scheduler.step; scheduler.Scheduler.step = __import__('functools').wraps(ours)(lambda *a: ours(*a))"
    assert sandbox.python(code.format(before=wrap)).out == "['patched', 7] ['patched', 8]\n"


def test_reload_to_something_that_cannot_be_patched_leaves_nothing_of_the_patch(sandbox: Sandbox) -> None:
    sandbox.patch(targets=[STEP, "fakeengine.worker:work"])
    sandbox.generate()
    done = sandbox.python("""
        import importlib, fakeengine.scheduler as scheduler, fakeengine.worker as worker
        with open(worker.__file__, "w") as file:
            file.write("def other(item):\\n    return ['other', item]\\nwork = other\\ndel other\\n#" + "x" * 100)
        importlib.reload(worker)
        with open(worker.__file__, "w") as file:
            file.write("class work:\\n    pass\\ndel work\\n#" + "y" * 200)
        importlib.reload(worker)
        print(scheduler.Scheduler().step(7), hasattr(worker, "work"))
        """)
    assert done.out == "[7] False\n"
    assert sandbox.reported()["state"] == "failed"


def test_a_lazy_loader(patched: Sandbox) -> None:
    done = patched.python("""
        import importlib.util, sys
        import fakeengine
        spec = importlib.util.find_spec("fakeengine.scheduler")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        print(type(module).__name__)
        print(module.Scheduler().step(7), type(module).__name__)
        """)
    assert done.out == "_LazyModule\n['patched', 7] module\n"
    assert patched.reported()["state"] == "applied"


@pytest.mark.parametrize("version", SERVED)
@pytest.mark.parametrize(
    "source",
    [
        "import fakeengine.worker\nclass Scheduler:\n    step = 1 / 0\n",
        "class Scheduler:\n    def step(self, number:\n",
        "from fakeengine.worker import nothing_of_that_name\n",
        "import no_such_module\n",
        "raise SystemExit(3)\n",
        "def helper():\n    raise RuntimeError('told') from ValueError('why')\nhelper()\n",
        "from fakeengine import broken\n",
        "\0",
    ],
    ids=["error", "syntax", "name", "module", "exit", "chain", "nested", "null"],
)
def test_tracebacks_are_identical(sandbox: Sandbox, source: str, version: str) -> None:
    sandbox.write({"fakeengine/broken.py": "import fakeengine.worker\nraise KeyError('deep')\n"})
    sandbox.patch(targets=[STEP, "fakeengine.worker:work"])  # of the engine as it was: what is there now is drift
    sandbox.generate()
    sandbox.write({"fakeengine/scheduler.py": source})
    python = str(interpreters.find(version))
    # What is said of the patch is not the matter here, so it is told not to speak.
    code = "def use():\n    import fakeengine.scheduler\nuse()"
    bare, armed = (
        sandbox.bare(code, python=python),
        sandbox.python(code, python=python, LIVEPATCH_AROUND="off"),
    )
    assert (armed.code, armed.out, armed.others) == (bare.code, bare.out, bare.lines)
    assert bare.code


def test_the_traceback_of_an_error_inside_a_patched_function_shows_its_lines(patched: Sandbox) -> None:
    done = patched.python("from fakeengine.scheduler import Scheduler\nScheduler().step()")
    assert done.code == 1
    assert "step() missing 1 required positional argument" in done.others[-1]


def test_a_module_that_fails_and_is_imported_again(sandbox: Sandbox) -> None:
    text = (sandbox.site / "fakeengine/scheduler.py").read_text("utf-8")
    sandbox.write(
        {"fakeengine/scheduler.py": "import os\nif os.environ.pop('FAIL', None): raise RuntimeError\n" + text}
    )
    sandbox.patch()
    sandbox.generate()
    done = sandbox.python(
        f"try:\n    import fakeengine.scheduler\nexcept RuntimeError:\n    print('no')\n{USE_STEP}", FAIL="1"
    )
    assert done.out == "no\n" + PATCHED
    assert (sandbox.reported()["state"], len(done.lines)) == ("applied", 1)


IMPORTS = {
    "import": "import fakeengine.scheduler as module",
    "from": "from fakeengine import scheduler as module",
    "import_module": "import importlib; module = importlib.import_module('fakeengine.scheduler')",
    "relative": "import importlib; module = importlib.import_module('.scheduler', 'fakeengine')",
    "__import__": "module = __import__('fakeengine.scheduler', fromlist=['x'])",
    "resolve_name": "import pkgutil; module = pkgutil.resolve_name('fakeengine.scheduler')",
    "in a thread": (
        "import threading, importlib; thread = threading.Thread(target=importlib.import_module, "
        "args=['fakeengine.scheduler']); thread.start(); thread.join(); import sys; module = sys.modules['fakeengine.scheduler']"
    ),
    "after invalidate_caches": "import importlib; importlib.invalidate_caches(); import fakeengine.scheduler as module",
    "through the package": "import fakeengine.indirect; module = fakeengine.indirect.scheduler",
    "unpickled": (
        "import pickle; made = pickle.loads(b'cfakeengine.scheduler\\nScheduler\\n)R.'); "
        "import sys; module = sys.modules['fakeengine.scheduler']"
    ),
}


@pytest.mark.parametrize("way", list(IMPORTS))
def test_every_way_to_import(patched: Sandbox, way: str) -> None:
    patched.write({"fakeengine/indirect.py": "from . import scheduler\n"})
    done = patched.python(f"{IMPORTS[way]}\nprint(module.Scheduler().step(7))")
    assert done.out == PATCHED, done.err
    assert len(done.lines) == 1


def test_the_importer_never_sees_the_stock_function(sandbox: Sandbox) -> None:
    """`from x import y` in the module that imports the target first."""
    sandbox.write({"fakeengine/user.py": "from fakeengine.worker import work\nfound = work(8)\n"})
    sandbox.patch(targets=["fakeengine.worker:work"])
    sandbox.generate()
    assert sandbox.python("import fakeengine.user; print(fakeengine.user.found)").out == "['patched', 8]\n"


def test_a_package_can_be_a_target(sandbox: Sandbox) -> None:
    sandbox.write({"fakeengine/__init__.py": "def begin(number):\n    return [number]\n"})
    sandbox.patch(targets=["fakeengine:begin"])
    sandbox.generate()
    done = both(sandbox, "import fakeengine, fakeengine.worker; print(fakeengine.__path__, fakeengine.worker.work(1))")
    assert "[1]" in done.out
    assert sandbox.python("import fakeengine; print(fakeengine.begin(7))").out == PATCHED


def test_a_target_that_is_not_there_is_missing_as_ever(patched: Sandbox) -> None:
    (patched.site / "fakeengine/scheduler.py").unlink()
    bare, armed = patched.bare("import fakeengine.scheduler"), patched.python("import fakeengine.scheduler")
    assert (armed.code, armed.out) == (bare.code, bare.out)
    assert armed.err.startswith(bare.err)
    assert "around is not applied (gone)" in armed.err  # it is the only target that the package would have
    code = "import importlib.util, fakeengine; print(importlib.util.find_spec('fakeengine.scheduler'))"
    assert patched.python(code).out == "None\n"
    assert STOCK != PATCHED


@pytest.mark.parametrize("version", SERVED)
def test_looking_for_a_target_neither_imports_nor_reads(patched: Sandbox, version: str) -> None:
    """But for the look-up itself, which another finder answers here: Python holds its global import lock meanwhile."""
    code = """
        import sys, fakeengine, importlib.machinery as machinery
        class Answers:
            @staticmethod
            def find_spec(name, path=None, target=None):
                return machinery.ModuleSpec(name, object())
        sys.meta_path.insert(1, Answers)
        seen = []
        modules = set(sys.modules)
        sys.addaudithook(lambda event, arguments: seen.append(event))
        sys.meta_path[0].find_spec("fakeengine.worker", fakeengine.__path__)
        sys.meta_path[0].find_spec("fakeengine.scheduler", fakeengine.__path__)
        asked, seen = seen, []
        print({event for event in asked if event in ("import", "open", "os.listdir")}, set(sys.modules) - modules)
        print(len(asked) > 0)
        """
    done = patched.python(code, python=str(interpreters.find(version)))
    assert (done.out, done.err) == ("set() set()\nTrue\n", "")
