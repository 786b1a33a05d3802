"""Targets that other finders than the interpreter's own find, and finders that do as they like."""

from __future__ import annotations

import shutil
import zipfile

import pytest

from tests.unit import interpreters
from tests.unit.support import PATCHED, USE_STEP, Sandbox

SHOW = "import fakeengine.scheduler as module; loader = module.__loader__; print(type(loader).__name__, vars(module)['__spec__'].origin)\n"


def test_a_zipped_package(patched: Sandbox) -> None:
    """A zip file's loader serves all of its modules: what is done for one must not show on another."""
    archive = patched.root / "engine.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for source in sorted(patched.site.rglob("*.py")):
            file.write(source, source.relative_to(patched.site))
    code = f"""
{SHOW}
import inspect, fakeengine.worker, fakeengine._version
print(loader.get_source("fakeengine.worker") == inspect.getsource(fakeengine.worker), sorted(vars(loader)), loader.archive)
print(loader.get_data(loader.archive + "/fakeengine/_version.py"), loader == fakeengine.__loader__)
"""
    bare = patched.python(code, path=[archive])
    armed = patched.python(code, path=[patched.bundle, archive])
    assert (armed.code, armed.out) == (bare.code, bare.out)
    assert armed.out.startswith("zipimporter ")
    assert patched.reported()["state"] == "applied"
    assert patched.python(USE_STEP, path=[patched.bundle, archive]).out == PATCHED


EDITABLE = """
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

class EditableFinder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "fakeengine":
            return spec_from_file_location(name, PLACE + "/__init__.py", submodule_search_locations=[PLACE])
        return None

sys.meta_path.append(EditableFinder)
"""


def test_an_editable_install_through_a_finder_of_its_own(patched: Sandbox) -> None:
    """What setuptools puts there: the package is on no path, only its finder knows its place."""
    elsewhere = patched.root / "checkout" / "src"
    elsewhere.parent.mkdir()
    shutil.move(patched.site / "fakeengine", elsewhere)
    done = patched.python(f"PLACE = {str(elsewhere)!r}\n{EDITABLE}\n{USE_STEP}")
    assert done.out == PATCHED, done.err
    assert (patched.reported()["state"], patched.reported()["verdict"]) == ("applied", "needed")
    assert patched.report()["packages"] == {"fakeengine": "1.0"}
    # Nor does its release have to be in its own words: the distribution's files name the package.
    (elsewhere / "_version.py").unlink()
    next(patched.state.iterdir()).unlink()
    info = {
        "METADATA": "Metadata-Version: 2.1\nName: other-name\nVersion: 1.0\n",
        "RECORD": "fakeengine/__init__.py,,\n",
    }
    patched.write(info, patched.site / "other_name-1.0.dist-info")
    patched.python(f"PLACE = {str(elsewhere)!r}\n{EDITABLE}\n{USE_STEP}")
    assert patched.report()["packages"] == {"fakeengine": "1.0"}


FINDERS = {
    "asks all finders again": """
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("fakeengine."):
            for finder in sys.meta_path:
                if finder is not Finder:
                    spec = finder.find_spec(name, path, target)
                    if spec is not None:
                        return spec
""",
    "asks find_spec again": """
class Finder:
    asking = set()
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.startswith("fakeengine.") and name not in cls.asking:
            cls.asking.add(name)
            try:
                return importlib.util.find_spec(name)
            finally:
                cls.asking.discard(name)
""",
    "raises on names": """
class Finder:
    def __getattribute__(self, name):
        if name == "__name__":
            raise RuntimeError("no name")
        return object.__getattribute__(self, name)
    def find_spec(self, name, path=None, target=None):
        return None
Finder = Finder()
""",
}


@pytest.mark.parametrize("where", ["insert(0, Finder)", "insert(1, Finder)", "append(Finder)"])
@pytest.mark.parametrize("finder", list(FINDERS))
def test_another_finder(patched: Sandbox, finder: str, where: str) -> None:
    done = patched.python(f"import sys, importlib.util{FINDERS[finder]}\nsys.meta_path.{where}\n{USE_STEP}")
    assert done.out == PATCHED, done.err
    assert len(done.lines) == 1


AROUND_ALL = """
import sys
class Around:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Around(finder) for finder in sys.meta_path]
"""


def test_finders_that_somebody_wrapped(patched: Sandbox) -> None:
    """Import profilers put something of theirs around every finder: ours is then in no list any more."""
    done = patched.python(AROUND_ALL + USE_STEP)
    assert done.out == PATCHED, done.err


LOADERS = {
    "a class": """
class Loader:
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def exec_module(module):
        exec(CODE, vars(module))
    @staticmethod
    def get_source(name=None):
        return open(FILE).read()
loader = Loader
""",
    "slots": """
class Loader:
    __slots__ = ()
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(CODE, vars(module))
    def get_source(self, name=None):
        return open(FILE).read()
loader = Loader()
""",
    "not to be copied": """
class Loader:
    def __copy__(self):
        raise TypeError("not to be copied")
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(CODE, vars(module))
    def get_source(self, name=None):
        return open(FILE).read()
loader = Loader()
""",
    "one for many modules": """
class Loader:
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(CODE, vars(module))
    def get_source(self, name=None):
        return open(FILE).read()
loader = Loader()
""",
}
OWN_LOADER = """
import sys
from importlib.machinery import ModuleSpec
CODE = compile(open(FILE).read(), FILE, "exec")
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "fakeengine.scheduler":
            spec = ModuleSpec(name, loader, origin=FILE)
            spec.has_location = True
            return spec
sys.meta_path.insert(1, Finder)
import importlib.util, fakeengine
found = importlib.util.find_spec("fakeengine.scheduler").loader
assert found is not loader and hasattr(found, "exec_module")
import fakeengine.scheduler
assert fakeengine.scheduler.__loader__ is fakeengine.scheduler.__spec__.loader is loader
assert "exec_module" not in getattr(loader, "__dict__", {}) or type(loader) is type
"""


@pytest.mark.parametrize("kind", list(LOADERS))
def test_loaders_of_every_kind(patched: Sandbox, kind: str) -> None:
    """Also those that cannot be copied; the module shows the loader itself."""
    before = f"FILE = {str(patched.site / 'fakeengine/scheduler.py')!r}\n"
    code = f"{before}{LOADERS[kind]}{OWN_LOADER}{USE_STEP}\ndel sys.modules['fakeengine.scheduler']\n{USE_STEP}"
    done = patched.python(code, LIVEPATCH="strict")
    assert (done.code, done.out, len(done.lines)) == (0, PATCHED * 2, 1), done.err
    assert patched.reported()["state"] == "applied"


LEGACY = """
import sys, types, warnings
warnings.simplefilter("ignore")
from importlib.machinery import ModuleSpec
class Loader:
    def load_module(self, name):
        module = sys.modules[name] = types.ModuleType(name)
        module.__file__ = FILE
        exec(compile(open(FILE).read(), FILE, "exec"), vars(module))
        return module
    def get_source(self, name=None):
        return open(FILE).read()
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, Loader()) if name == "fakeengine.scheduler" else None
sys.meta_path.insert(1, Finder)
"""


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_a_loader_of_the_kind_that_python_has_given_up(patched: Sandbox, version: str) -> None:
    code = f"FILE = {str(patched.site / 'fakeengine/scheduler.py')!r}\n{LEGACY}{USE_STEP}"
    python = str(interpreters.find(version))
    bare, done = patched.bare(code, python=python), patched.python(code, python=python)
    assert (done.code, done.out) == (bare.code, PATCHED if bare.code == 0 else bare.out), done.err


def test_two_threads_that_look_for_one_target_at_once(patched: Sandbox) -> None:
    """One asks our finder where it is, as other finders do, and waits behind us; another imports it meanwhile."""
    done = patched.python(
        """
        import sys, threading

        class Slow:
            waits, goes = threading.Event(), threading.Event()

            def find_spec(self, name, path=None, target=None):
                if name == "fakeengine.scheduler" and threading.current_thread().name == "looks":
                    self.waits.set()
                    assert self.goes.wait(50)

        import fakeengine
        slow = Slow()
        sys.meta_path.insert(1, slow)
        asked = "fakeengine.scheduler", fakeengine.__path__
        looks = threading.Thread(target=sys.meta_path[0].find_spec, args=asked, name="looks")
        looks.start()
        assert slow.waits.wait(50)
        from fakeengine.scheduler import Scheduler
        print(Scheduler().step(7))
        slow.goes.set()
        looks.join()
        """
    )
    assert (done.code, done.out) == (0, PATCHED), done.err
