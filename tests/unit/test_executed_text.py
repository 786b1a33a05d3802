"""What is decided on is the text that the executing loader has: not a file of the same name elsewhere."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import shutil
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize import executed_text
from wrapt.importer import _ImportHookChainedLoader

from tests.unit import interpreters
from tests.unit.support import PASTED_LOADER, PATCHED, PYTHON, STEP, STOCK, USE_STEP, WORK, Done, Sandbox

OTHER = "class Scheduler:\n    def step(self, number):\n        return ['overlay', number]\n"
OVERLAY = "['overlay', 7]\n"
UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
REDIRECTS = """
import sys
from importlib.machinery import {kind}
from importlib.util import spec_from_file_location
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {name!r}:
            return spec_from_file_location(name, {file!r}, loader={kind}(name, {file!r}))
sys.meta_path.insert({where}, Finder)
"""
# A package whose `__path__` names another folder first, as pkgutil.extend_path and vendors' overlays do it.
EXTENDS = "__path__.insert(0, {folder!r})\n"


def redirects(file: Path, name: str = "fakeengine.scheduler", kind: str = "SourceFileLoader", where: int = 1) -> str:
    return REDIRECTS.format(name=name, file=str(file), kind=kind, where=where)


def overlay(sandbox: Sandbox, text: str = OTHER) -> Path:
    """A vendor's file of the target module, elsewhere."""
    file = sandbox.root / "overlay/scheduler.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def is_refused(sandbox: Sandbox, done: Done, out: str, why: str = "") -> None:
    """Not patched, said, and `drifted`."""
    assert (done.code, done.out) == (0, out), done.err
    reported = sandbox.reported()
    assert (reported["state"], reported["verdict"]) == ("skipped", "drifted"), reported
    assert any("around is not applied (drifted)" in line and why in line for line in done.others), done.err


def test_another_finder_gives_another_text(patched: Sandbox) -> None:
    code = redirects(overlay(patched)) + USE_STEP
    is_refused(patched, patched.python(code), OVERLAY, "code that was never verified: fakeengine.scheduler:Scheduler")
    done = patched.python(code, LIVEPATCH="strict")
    assert (done.code, done.out) == (78, ""), done.err


def test_another_finder_gives_the_same_text_from_elsewhere(patched: Sandbox) -> None:
    """The file that the path alone leads to has drifted: nobody executes it."""
    same = patched.site / "fakeengine/scheduler.py"
    code = redirects(overlay(patched, same.read_text())) + USE_STEP
    same.write_text(OTHER)
    done = patched.python(code, LIVEPATCH="strict")
    assert (done.code, done.out) == (0, PATCHED), done.err
    assert (patched.reported()["state"], patched.reported()["verdict"]) == ("applied", "needed")


def test_a_patch_beside_traced_code_applies_also_where_that_one_was_refused_first(sandbox: Sandbox) -> None:
    """The drifted file is looked at as `worker` is imported, and another text is executed: it keeps `beside` away."""
    sandbox.patch(traced=True)
    sandbox.patch("beside", [WORK], auto="traced")
    sandbox.generate()
    same = sandbox.site / "fakeengine/scheduler.py"
    code = redirects(overlay(sandbox, same.read_text())) + "import fakeengine.worker\n" + USE_STEP
    same.write_text(OTHER)
    done = sandbox.python(code)
    assert (done.code, done.out) == (0, PATCHED), done.err
    assert [sandbox.reported(name)["state"] for name in ("around", "beside")] == ["applied", "applied"]


def test_a_forced_patch_applies_to_another_text(patched: Sandbox) -> None:
    done = patched.python(redirects(overlay(patched)) + USE_STEP, LIVEPATCH_AROUND="force")
    assert done.out == "['patched', 'overlay', 7]\n", done.err


def nested(sandbox: Sandbox, extends: bool = True) -> str:
    """A subpackage that extends its own path, which nothing but its import tells."""
    target = "fakeengine.core.scheduler:Scheduler.step"
    engine = (sandbox.site / "fakeengine/scheduler.py").read_text()
    sandbox.write({"fakeengine/core/__init__.py": "", "fakeengine/core/scheduler.py": engine})
    sandbox.patch(targets=[target])
    sandbox.generate()
    if extends:
        extended = EXTENDS.format(folder=str(overlay(sandbox).parent))
        (sandbox.site / "fakeengine/core/__init__.py").write_text(extended)
    return target


def test_a_package_that_extends_its_path(sandbox: Sandbox) -> None:
    nested(sandbox)
    done = sandbox.python("from fakeengine.core.scheduler import Scheduler; print(Scheduler().step(7))")
    is_refused(sandbox, done, OVERLAY)


def test_the_second_of_two_targets_is_in_a_package_that_extends_its_path_later(sandbox: Sandbox) -> None:
    """When the first one is decided on, the second one's package is not imported: nobody knows its path."""
    target = nested(sandbox)
    plain = sandbox.site / "fakeengine/core/__init__.py"
    extends = plain.read_text()
    plain.write_text("")
    sandbox.patch(targets=[STEP, target])
    sandbox.generate()
    plain.write_text(extends)
    code = f"{USE_STEP}\nfrom fakeengine.core.scheduler import Scheduler; print(Scheduler().step(7))"
    is_refused(sandbox, sandbox.python(code), STOCK + OVERLAY)
    assert sandbox.python(code, LIVEPATCH="strict").code == 78


@pytest.mark.parametrize("per_module", [False, True])
def test_what_the_patch_calls_comes_from_elsewhere_than_it_was_looked_at(sandbox: Sandbox, per_module: bool) -> None:
    """It is imported after the patch was applied. No target: it does not come through us."""
    target = nested(sandbox)
    plain = sandbox.site / "fakeengine/core/__init__.py"
    extends = plain.read_text()
    plain.write_text("")
    sandbox.patch(calls=[target], per_module=per_module)
    sandbox.generate()
    plain.write_text(extends)
    sandbox.write({"fakeengine/all.py": "import fakeengine.scheduler, fakeengine.core.scheduler\n"})
    code = f"import fakeengine.all\n{USE_STEP}"
    done = sandbox.python(code)
    assert (done.code, done.out) == (0, STOCK), done.err
    assert (sandbox.reported()["state"], sandbox.reported()["reason"]) == ("failed", "drifted")
    assert "fakeengine.core.scheduler:Scheduler.step" in sandbox.reported()["detail"]
    assert sandbox.python(code, LIVEPATCH="strict").code == 78


@pytest.mark.parametrize("when", ["before", "with it", "later", "never"])
@pytest.mark.parametrize("text", [OTHER, None], ids=["another", "the same"])
def test_what_the_patch_calls_is_found_by_another_finder(sandbox: Sandbox, text: str | None, when: str) -> None:
    """No finder but the interpreter's own is asked before the import. What comes by another one is decided on anew."""
    work = "fakeengine.worker:work"
    sandbox.write({"fakeengine/all.py": "import fakeengine.scheduler, fakeengine.worker\n"})
    sandbox.patch(calls=[work])
    sandbox.generate()
    original = (sandbox.site / "fakeengine/worker.py").read_text()
    code = redirects(overlay(sandbox, text or original), "fakeengine.worker")
    (sandbox.site / "fakeengine/worker.py").write_text("other = 1\n")  # nobody executes this one
    first = {"before": "import fakeengine.worker", "with it": "import fakeengine.all"}.get(when, "import fakeengine")
    last = "import fakeengine.worker\n" if when == "later" else ""
    code = f"{code}{first}\n{USE_STEP}\n{last}{USE_STEP}\n"
    done = sandbox.python(f"{code}assert ('fakeengine.worker' in sys.modules) is {when != 'never'}")
    if text is None and when in ("before", "with it"):
        assert (done.code, done.out, done.others) == (0, PATCHED * 2, []), done.err
        assert (sandbox.reported()["state"], sandbox.reported()["verdict"]) == ("applied", "needed")
    else:  # applied later, the patch would come to an engine that has begun without it
        is_refused(sandbox, done, STOCK * 2, work)
        assert sandbox.python(code, LIVEPATCH="strict").code == 78


@pytest.mark.parametrize("number", [1, 2])
def test_what_the_patch_calls_comes_in_another_known_form(sandbox: Sandbox, number: int) -> None:
    """The wrappers were made with the facts of the form that was found before."""
    work = "fakeengine.worker:work"
    sandbox.write({"fakeengine/all.py": "import fakeengine.scheduler, fakeengine.worker\n"})
    own = (sandbox.site / "fakeengine/worker.py").read_text()
    (sandbox.site / "fakeengine/worker.py").write_text(own.replace("[item]", "[item, 2]"))
    second = {"releases": ["2.0"], "code": sandbox.fingerprints(STEP, work), "facts": {"number": number}}
    code = redirects(overlay(sandbox, (sandbox.site / "fakeengine/worker.py").read_text()), "fakeengine.worker")
    (sandbox.site / "fakeengine/worker.py").write_text(own)
    first = {"releases": ["1.0"], "code": sandbox.fingerprints(STEP, work), "facts": {"number": 1}}
    sandbox.patch(calls=[work], variant=[first, second])
    sandbox.generate()
    code = f"{code}import fakeengine.all\n{USE_STEP}\n"
    done = sandbox.python(code)
    if number == 1:
        assert (done.code, done.out) == (0, PATCHED), done.err
        assert sandbox.reported()["state"] == "applied"
    else:
        assert (done.code, done.out) == (0, STOCK), done.err
        assert (sandbox.reported()["state"], sandbox.reported()["reason"]) == ("failed", "drifted")
        assert "fakeengine.worker came with code of another form" in sandbox.reported()["detail"]
        assert sandbox.python(code, LIVEPATCH="strict").code == 78


ONCE = (
    PASTED_LOADER
    + """
import importlib.util, sys
from importlib.machinery import PathFinder
def pasted(module):
    print("the recipe has run:", module.__name__)
    module.pasted = True
class Finder:
    waits = True
    def find_spec(self, name, path=None, target=None):
        if name == {name!r} and self.waits:
            {once}
            spec = {find}
            spec.loader = Loader(spec.loader)
            return spec
sys.meta_path.insert({where}, Finder())
"""
)


@pytest.mark.parametrize(
    ("where", "once", "find"),
    [
        (0, "sys.meta_path.remove(self)", "importlib.util.find_spec(name)"),
        (1, "sys.meta_path.remove(self)", "PathFinder.find_spec(name, path)"),
        (0, "self.waits = False", "PathFinder.find_spec(name, path)"),
    ],
)
@pytest.mark.parametrize("name", ["fakeengine._version", "fakeengine.worker", "companion.part", "fakeengine.last"])
def test_a_finder_that_answers_once_is_there_for_the_import_that_it_waits_for(
    sandbox: Sandbox, name: str, where: int, once: str, find: str
) -> None:
    """The recipe of many start scripts, for a module that the bundle looks at before it is imported: of the release, a
    second target, a companion, and what the patch calls.
    """
    calls = {"fakeengine.last:end": "def end(): return 1\n", "companion.part:run": "def run(): return 1\n"}
    sandbox.write({f"{call.partition(':')[0].replace('.', '/')}.py": text for call, text in calls.items()})
    sandbox.write({"companion/__init__.py": ""})
    companion = {"package": "companion", "releases": ["2.0"], "code": sandbox.fingerprints("companion.part:run")}
    sandbox.write({"companion/_version.py": "__version__ = '2.0'\n"})
    sandbox.patch()
    more = {"releases": ["1.0"], "code": sandbox.fingerprints(STEP, WORK, "fakeengine.last:end")}
    sandbox.patch("other", [STEP, WORK], calls=list(calls), variant=[more], companion=[companion])
    sandbox.generate()
    recipe = ONCE.format(name=name, where=where, once=once, find=find)
    code = f"{recipe}\nimport fakeengine.scheduler, fakeengine.worker, {name}\nprint({name}.pasted)\n{USE_STEP}"
    bare, done = sandbox.bare(code), sandbox.python(code)
    ran = f"the recipe has run: {name}\nTrue\n"
    assert (bare.code, bare.out) == (0, f"{ran}{STOCK}"), bare.err
    assert done.code == 0, done.err
    assert done.out.startswith(ran), done.err
    if (name, where, find[:4]) == ("fakeengine.worker", 0, "Path"):  # past our finder
        assert (sandbox.reported("other")["state"], sandbox.reported("other")["reason"]) == ("failed", "bypassed")
    else:
        assert sandbox.reported("other")["state"] == "applied", done.err
        assert sandbox.python(code, LIVEPATCH="strict").code == 0


def compiled(
    sandbox: Sandbox, source: Path, text: str, mode: py_compile.PycInvalidationMode, python: str = PYTHON
) -> Path:
    """Bytecode of `text` where an interpreter looks for that of `source`."""
    code = f"""
        import importlib.util, os, py_compile
        place = importlib.util.cache_from_source({str(source)!r})
        os.makedirs(os.path.dirname(place), exist_ok=True)
        open("text.py", "w").write({text!r})
        mode = py_compile.PycInvalidationMode[{mode.name!r}]
        py_compile.compile("text.py", place, dfile={str(source)!r}, doraise=True, invalidation_mode=mode)
        print(place)
        """
    return Path(sandbox.bare(code, python=python).out.strip())


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_bytecode_that_nobody_compares_with_its_source(patched: Sandbox, version: str) -> None:
    python = str(interpreters.find(version))
    source = patched.site / "fakeengine/scheduler.py"
    place = compiled(patched, source, OTHER, UNCHECKED, python)
    is_refused(patched, patched.python(USE_STEP, python=python), OVERLAY, f"runs {place}, which nobody compares")
    assert patched.python(USE_STEP, python=python, LIVEPATCH="strict").code == 78
    # The interpreter can be told to compare it; then it runs the source.
    always = ("--check-hash-based-pycs", "always")
    assert patched.python(USE_STEP, *always, python=python, LIVEPATCH="strict").out == PATCHED


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode), ids=lambda mode: mode.name)
def test_bytecode_of_its_source_however_it_is_checked(patched: Sandbox, mode: py_compile.PycInvalidationMode) -> None:
    source = patched.site / "fakeengine/scheduler.py"
    place = compiled(patched, source, source.read_text(), mode)
    assert place.is_file()
    done = patched.python(USE_STEP, LIVEPATCH="strict")
    assert (done.code, done.out) == (0, PATCHED), done.err
    # Without a check by the interpreter, bytecode of a source that was edited since is run.
    source.write_text(OTHER)
    next(patched.state.iterdir()).unlink()
    done = patched.python(USE_STEP)
    is_refused(patched, done, STOCK if mode is UNCHECKED else OVERLAY)


@pytest.mark.parametrize("same", [False, True], ids=["of another source", "of its own source"])
def test_bytecode_with_the_time_and_the_size_of_another_source(patched: Sandbox, same: bool) -> None:
    """A file that is written twice within a second, or where a build gives all files one time: the interpreter runs the
    bytecode of the first one.
    """
    source = patched.site / "fakeengine/scheduler.py"
    text = source.read_text()
    other = text if same else text.replace("[number]", "(number)")
    assert len(other) == len(text)
    source.write_text(other)
    patched.bare("import fakeengine.scheduler")
    place = Path(importlib.util.cache_from_source(str(source)))
    assert place.is_file()
    was = source.stat()
    source.write_text(text)
    for file in (source, place):
        os.utime(file, ns=(was.st_mtime_ns, was.st_mtime_ns))
    if same:
        assert patched.python(USE_STEP, LIVEPATCH="strict").out == PATCHED
    else:
        is_refused(
            patched, patched.python(USE_STEP), "7\n", f"runs {place}, which has the time and the size of its source"
        )
        assert patched.python(USE_STEP, LIVEPATCH="strict").code == 78
        os.utime(source, (1, 1))
        assert patched.python(USE_STEP, LIVEPATCH="strict").out == PATCHED, "Python compares them"


def test_a_source_that_was_put_in_the_place_of_another_one_after_the_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a build that gives all files one time, the bytecode is younger than both: the interpreter runs the first one's."""
    monkeypatch.setattr(executed_text, "_CLOSE_SECONDS", 0.0)
    source = tmp_path / "module.py"
    loader = SourceFileLoader("module", str(source))

    def write(text: str) -> None:
        source.write_text(text)
        os.utime(source, (1, 1))

    write("number = 1\n")
    py_compile.compile(str(source), doraise=True)
    assert executed_text.of(loader, "module") == "number = 1\n"
    write("number = 2\n")
    with pytest.raises(executed_text.Unknown, match="which has the time and the size of its source"):
        executed_text.of(loader, "module")
    write("number = 1\n")
    assert executed_text.of(loader, "module") == "number = 1\n"


def test_a_module_without_a_source(patched: Sandbox) -> None:
    source = patched.site / "fakeengine/scheduler.py"
    shutil.move(compiled(patched, source, source.read_text(), UNCHECKED), source.with_suffix(".pyc"))
    source.unlink()
    why = "fakeengine.scheduler is loaded by _frozen_importlib_external.SourcelessFileLoader, which has no source of it"
    is_refused(patched, patched.python(USE_STEP), STOCK, why)
    assert patched.python(USE_STEP, LIVEPATCH="strict").code == 78


@pytest.mark.parametrize("text", [OTHER, None], ids=["of another source", "of its own source"])
def test_bytecode_in_a_zip_file(patched: Sandbox, text: str | None) -> None:
    source = patched.site / "fakeengine/scheduler.py"
    place = compiled(patched, source, text or source.read_text(), UNCHECKED)
    archive = patched.root / "engine.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for one in sorted(patched.site.rglob("*.py")):
            file.write(one, one.relative_to(patched.site))
        file.write(place, "fakeengine/scheduler.pyc")
    done = patched.python(USE_STEP, path=[patched.bundle, archive])
    if text is None:
        # Its functions name a file that is not the module's: they count as somebody else's, as ever.
        assert (done.out, patched.reported()["verdict"], patched.reported()["reason"]) == (STOCK, "needed", "foreign")
    else:
        is_refused(patched, done, OVERLAY, "zipimporter, which runs other code than that of its source")


LOADERS = {
    "transforms the source": """
class Loader(SourceFileLoader):
    def source_to_code(self, data, path, *, _optimization=-1):
        return super().source_to_code(data.replace(b"[number]", b"['transformed', number]"), path)
""",
    "has bytecode of its own": """
class Loader(SourceFileLoader):
    def get_code(self, name):
        return compile(self.get_data(self.path).replace(b"[number]", b"['transformed', number]"), self.path, "exec")
""",
    "has data of its own": """
class Loader(SourceFileLoader):
    def get_data(self, path):
        return super().get_data(path).replace(b"[number]", b"['transformed', number]")
""",
    "shows no source": """
class Loader:
    def __init__(self, name, path):
        self.path = path
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(open(self.path).read().replace("[number]", "['transformed', number]"), vars(module))
""",
    "cannot be asked": """
class Loader(SourceFileLoader):
    def get_source(self, name):
        raise LookupError("no such source")
    def get_code(self, name):
        return compile(self.get_data(self.path).replace(b"[number]", b"['transformed', number]"), self.path, "exec")
""",
}


@pytest.mark.parametrize("kind", list(LOADERS))
def test_a_loader_that_runs_another_code_than_its_files(patched: Sandbox, kind: str) -> None:
    finder = redirects(patched.site / "fakeengine/scheduler.py", kind="SourceFileLoader")
    finder = finder.replace("loader=SourceFileLoader", "loader=Loader")
    is_refused(
        patched,
        patched.python(f"from importlib.machinery import SourceFileLoader\n{LOADERS[kind]}{finder}{USE_STEP}"),
        "['transformed', 7]\n",
    )


def test_a_loader_of_its_own_kind_that_runs_its_text(patched: Sandbox) -> None:
    finder = redirects(patched.site / "fakeengine/scheduler.py").replace("loader=SourceFileLoader", "loader=Loader")
    own = """
from importlib.machinery import SourceFileLoader
class Loader(SourceFileLoader):
    def source_to_code(self, data, path, *, _optimization=-1):
        return super().source_to_code(data, path)
"""
    done = patched.python(f"{own}{finder}{USE_STEP}", LIVEPATCH="strict")
    assert (done.code, done.out) == (0, PATCHED), done.err


def test_the_loader_is_another_one_when_the_module_is_imported_again(patched: Sandbox) -> None:
    code = f"{USE_STEP}\n{redirects(overlay(patched))}\ndel sys.modules['fakeengine.scheduler']\n{USE_STEP}"
    done = patched.python(code)
    assert (done.code, done.out) == (0, PATCHED + OVERLAY), done.err
    assert (patched.reported()["state"], patched.reported()["verdict"]) == ("failed", "drifted")


def test_a_package_that_is_a_target_could_not_be_imported(sandbox: Sandbox) -> None:
    """Who tries it once more, when what it lacked has come, has the patch: what is inside of the package is found."""
    package = {
        "__init__.py": "import os\nassert 'READY' in os.environ\ndef begin(): return []\n",
        "inner.py": "def end(): return []\n",
    }
    sandbox.write({f"fakeengine/parts/{name}": text for name, text in package.items()})
    sandbox.patch(targets=["fakeengine.parts:begin", STEP], calls=["fakeengine.parts.inner:end"])
    sandbox.generate()
    code = f"""
        try:
            import fakeengine.parts
        except AssertionError:
            import os; os.environ["READY"] = "1"
        import fakeengine.scheduler, fakeengine.parts
        {USE_STEP}
        """
    done = sandbox.python(code, LIVEPATCH="strict")
    assert (done.code, done.out) == (0, PATCHED), done.err


def test_the_loader_of_wrapts_import_hooks_only_looks_on(tmp_path: Path) -> None:
    """In wrapt's newer releases it is a proxy, which shows the names of what it wraps in the place of its own."""
    file = tmp_path / "module.py"
    file.write_text("value = 1\n")
    loader = SourceFileLoader("module", str(file))
    around = _ImportHookChainedLoader(loader)
    assert executed_text.innermost(around) is loader
    assert executed_text.of(around, "module") == "value = 1\n"
