"""The entry: what it costs a process that imports no target, where it does nothing at all, and a bundle that is damaged."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch import sitecustomize

from tests.unit import interpreters
from tests.unit.support import PATCHED, PYTHON, STOCK, USE_STEP, Sandbox, finish

ENTRY = Path(next(iter(sitecustomize.__path__)), "entry.py")
STATE_OF_IMPORTS = """
import sys
modules = sorted(sys.modules)
import json
json.dump({
    "modules": modules,
    "meta_path": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
    "path_hooks": len(sys.path_hooks),
    "path": [part for part in sys.path if part != BUNDLE],
    "flags": [str(sys.flags), sorted(sys.warnoptions)],
    "threads": [thread.name for thread in sys.modules["threading"].enumerate()] if "threading" in sys.modules else [],
}, sys.stdout)
"""


def imports(
    sandbox: Sandbox, before: str = "", *, armed: bool = True, path: list[Path] | None = None, **more: str
) -> dict[str, list[str]]:
    code = f"{before}\nBUNDLE = {str(sandbox.bundle)!r}\n{STATE_OF_IMPORTS}"
    path = path or ([sandbox.bundle, sandbox.site] if armed else [sandbox.site])
    done = sandbox.python(code, path=path, **more)
    assert (done.code, done.err) == (0, "")
    return dict(json.loads(done.out))


@pytest.mark.parametrize("before", ["", "import fakeengine, fakeengine.worker, json, threading, importlib.metadata"])
def test_unwanted_costs_nothing(patched: Sandbox, before: str) -> None:
    bare, armed = imports(patched, before, armed=False), imports(patched, before)
    assert armed.pop("modules") == sorted({*bare.pop("modules"), "sitecustomize"})  # Debian's has one
    assert armed.pop("meta_path") == ["LivepatchFinder", *bare.pop("meta_path")]
    assert armed == bare
    assert not patched.state.exists()
    assert list(patched.home.iterdir()) == []


@pytest.mark.parametrize("before", ["", "import fakeengine.scheduler"])
def test_off_leaves_everything_as_it_was(patched: Sandbox, before: str) -> None:
    assert imports(patched, before, LIVEPATCH="off") == imports(patched, before, armed=False)
    done = patched.python(USE_STEP, LIVEPATCH="off")
    assert (done.out, done.err) == (STOCK, "")
    assert not patched.state.exists()


def test_the_zip_costs_the_import_of_zip_files_and_nothing_else(patched: Sandbox) -> None:
    archive = patched.root / "bundle.zip"
    shutil.make_archive(str(archive.with_suffix("")), "zip", patched.bundle)
    other = patched.root / "other.zip"
    shutil.make_archive(str(other.with_suffix("")), "zip", patched.site)
    bare = imports(patched, f"BUNDLE = {str(archive)!r}", path=[other])
    armed = imports(patched, path=[archive, other])
    assert set(armed["modules"]) - set(bare["modules"]) <= {"sitecustomize"} | set(imports_of_zip())


def imports_of_zip() -> list[str]:
    """What the interpreter itself imports to read a compressed member."""
    code = "import sys, json, zlib, time, struct, zipimport; json.dump(sorted(sys.modules), sys.stdout)"
    return list(json.loads(finish([PYTHON, "-c", code], {}).out))


def test_the_entry_imports_nothing_that_site_has_not_imported() -> None:
    """Whatever else it needs comes with the first target; and 2.7 must be able to read it."""
    tree = ast.parse(ENTRY.read_text("utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    assert found == {
        "os",
        "sys",
        "_frozen_importlib",
        "_frozen_importlib_external",
    }
    assert ENTRY.read_bytes().isascii()
    assert len(ENTRY.read_text("ascii").splitlines()) <= 100


def test_what_is_importable_is_two_names(patched: Sandbox) -> None:
    """The bundle's copy of wrapt shadows nobody's, and nothing of ours imports either."""
    generation = patched.package.parent.name
    assert {path.name for path in patched.bundle.iterdir()} - {"__pycache__"} == {
        "sitecustomize.py",
        generation,
        "manifest.json",
        "sbom.cdx.json",
        "__main__.py",  # which no import finds: every interpreter has one from its start
    }
    assert not generation.isidentifier()
    assert {path.name for path in patched.package.parent.iterdir()} == {"_vllm_livepatch", "manifest.json"}
    patched.write({"wrapt/__init__.py": "whose = 'theirs'\n"})
    show = "import sys\nprint([name for name in sys.modules if 'wrapt' in name])\nimport wrapt\nprint(wrapt.whose)"
    assert patched.python(f"{USE_STEP}\n{show}").out == f"{PATCHED}[]\ntheirs\n"


def test_a_target_pulls_nothing_into_the_namespace_of_others(patched: Sandbox) -> None:
    done = patched.python(
        f"import sys\n{USE_STEP}\nprint([name for name in sys.modules if 'wrapt' in name or 'livepatch' in name])"
    )
    names = ast.literal_eval(done.out.splitlines()[1])
    assert names
    assert all(name.split(".")[0] == "_vllm_livepatch" for name in names)


def test_two_bundles_on_the_path_patch_once(patched: Sandbox) -> None:
    second = patched.root / "second"
    shutil.copytree(patched.bundle, second)
    patched.write({"sitecustomize.py": "print('the next one')\n"})
    done = patched.python(USE_STEP, path=[patched.bundle, second, patched.site])
    assert (done.out, len(done.lines)) == ("the next one\n" + PATCHED, 1)
    assert patched.report()["bundle"] == str(patched.bundle)


def test_a_second_bundle_leaves_no_trace(patched: Sandbox) -> None:
    """It is not in use, and there is no other `sitecustomize`: to the process there is none."""
    second = patched.root / "second"
    shutil.copytree(patched.bundle, second)
    code = "import sys\nprint('sitecustomize' in sys.modules, sys.meta_path[0].__name__, len(sys.meta_path))"
    alone, both = (patched.python(code, path=[patched.bundle, *more, patched.site]) for more in ([], [second]))
    assert (both.code, both.err, both.out) == (0, "", alone.out.replace("True", "False"))


def test_the_same_bundle_twice_on_the_path(patched: Sandbox) -> None:
    link = patched.root / "link"
    link.symlink_to(patched.bundle)
    done = patched.python(USE_STEP, path=[f"{patched.bundle}/", patched.bundle, link, patched.site, ""])
    assert (done.out, len(done.lines)) == (PATCHED, 1)


def test_a_target_that_was_imported_before_the_entry_ran(patched: Sandbox) -> None:
    """A .pth file of site-packages may import anything, and runs before sitecustomize does."""
    done = finish([PYTHON, "-m", "venv", "--without-pip", str(patched.root / "venv")], patched.environ(path=[]))
    assert done.code == 0
    (site_packages,) = (patched.root / "venv").glob("lib/python3*/site-packages")
    (site_packages / "early.pth").write_text("import fakeengine.scheduler\n")
    done = patched.python(USE_STEP, python=str(patched.root / "venv/bin/python"))
    assert done.out == PATCHED
    assert patched.reported()["state"] == "applied"


# A damaged bundle: the process works, unpatched, and says so in one line; under strict it ends.

DAMAGE = {
    "catalogue.json is no JSON": lambda package: (package / "catalogue.json").write_text("{"),
    "catalogue.json is something else": lambda package: (package / "catalogue.json").write_text("[]"),
    "catalogue.json is missing": lambda package: (package / "catalogue.json").unlink(),
    "catalogue.json has a fault": lambda package: (package / "catalogue.json").write_text(
        (package / "catalogue.json").read_text().replace('"targets"', '"tragets"')
    ),
    "a part of the runtime is missing": lambda package: (package / "sitecustomize/report.py").unlink(),
    "a part of the runtime is cut off": lambda package: (package / "sitecustomize/hook.py").write_text("def"),
    "the package is gone": lambda package: shutil.rmtree(package),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_bundle(patched: Sandbox, damage: str) -> None:
    DAMAGE[damage](patched.package)
    code = f"{USE_STEP}\nimport importlib; importlib.reload(importlib.import_module('fakeengine.scheduler'))"
    done = patched.python(code)
    assert (done.code, done.out) == (0, STOCK)
    (line,) = done.lines
    assert line.startswith("vllm-livepatch: the bundle ")
    assert "nothing is patched: " in line
    assert not patched.state.exists()
    done = patched.python(code, LIVEPATCH="strict")
    assert (done.code, done.out) == (78, "")
    assert all(
        line.startswith("vllm-livepatch: ") and re.search("bundle .* nothing is patched", line) for line in done.lines
    )
    assert len(done.lines) == 1
    assert patched.python("print('unwanted')", LIVEPATCH="strict").out == "unwanted\n"


def test_damage_that_is_no_matter_at_run_time(patched: Sandbox) -> None:
    (patched.bundle / "manifest.json").write_text("{")
    done = patched.python(USE_STEP)
    assert (done.out, len(done.lines)) == (PATCHED, 1)


def test_a_bundle_that_is_taken_away_from_under_a_process(patched: Sandbox) -> None:
    done = patched.python(f"import shutil\nshutil.rmtree({str(patched.bundle)!r})\n{USE_STEP}")
    assert (done.code, done.out, len(done.lines)) == (0, STOCK, 1)


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
@pytest.mark.parametrize(
    "how", ["sys.stderr = None", "sys.stderr.close()", "os.close(2)", "sys.stderr = io.StringIO()"]
)
def test_a_process_without_stderr(patched: Sandbox, how: str, damaged: bool) -> None:
    if damaged:
        (patched.package / "sitecustomize/report.py").unlink()
    code = f"import io, os, sys\n{how}\n{USE_STEP}"
    bare, done = patched.bare(code), patched.python(code)
    assert (done.code, done.out, done.err) == (bare.code, STOCK if damaged else PATCHED, bare.err)


def test_a_stderr_of_somebodys_own_is_written_to(patched: Sandbox) -> None:
    show = "atexit.register(lambda: print(own.getvalue(), end=''))"
    done = patched.python(f"import atexit, io, sys\nsys.stderr = own = io.StringIO()\n{show}\n{USE_STEP}")
    assert done.out.startswith(f"{PATCHED}vllm-livepatch: ")
    assert done.err == ""


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_every_supported_interpreter_is_served(patched: Sandbox, version: str) -> None:
    """With warnings as errors and in development mode, too: there is nothing to complain of."""
    python = str(interpreters.find(version))
    assert patched.python(USE_STEP, python=python).out == PATCHED
    done = patched.python(USE_STEP, "-W", "error", "-X", "dev", python=python)
    assert (done.code, done.out, len(done.lines)) == (0, PATCHED, 1), done.err
    done = patched.python(USE_STEP, "-OO", "-B", python=python)
    assert (done.code, done.out, len(done.lines)) == (0, PATCHED, 1), done.err


def parts_of_the_entry(*functions: str, **names: Any) -> dict[str, Any]:
    """Some of its functions by themselves: as a whole it would arm this process."""
    tree = ast.parse(ENTRY.read_text("utf-8"))
    wanted = [
        node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in functions
    ]
    assert len(wanted) == len(functions)
    module = ast.Module(body=list(wanted), type_ignores=[])
    exec(compile(module, str(ENTRY), "exec"), names)
    return names


@pytest.mark.parametrize(
    ("version", "served"),
    [
        ((2, 7), False),
        ((3, 9), False),
        ((3, 10), True),
        ((3, 14), True),
        ((3, 15), False),
        ((4, 0), False),
        ((4, 10), False),
    ],
)
def test_the_interpreters_that_it_serves(version: tuple[int, int], served: bool) -> None:
    process = SimpleNamespace(version_info=(*version, 0), meta_path=[], modules={})
    names = parts_of_the_entry(
        "arm", os=SimpleNamespace(environ={}), sys=process, OFF=("off",), TARGETS={}, LATE=False, LivepatchFinder="ours"
    )
    assert names["arm"]() is served
    assert process.meta_path == (["ours"] if served else [])


@pytest.mark.parametrize(("mode", "first"), [("auto", True), ("off", False)])
def test_where_it_is_off_the_next_sitecustomize_has_the_path_to_itself(
    patched: Sandbox, mode: str, first: bool
) -> None:
    """OpenTelemetry's puts itself in front, for what this process starts; ours comes before it only where it serves."""
    other = patched.root / "other"
    other.mkdir()
    code = f"import os\nos.environ['PYTHONPATH'] = os.pathsep.join([{str(other)!r}, os.environ['PYTHONPATH']])\n"
    (other / "sitecustomize.py").write_text(code, "utf-8")
    done = patched.python(
        "import os; print(os.environ['PYTHONPATH'])", path=[patched.bundle, other, patched.site], LIVEPATCH=mode
    )
    begin = done.out.strip().split(os.pathsep)[:2]
    both = [str(patched.bundle), str(other)]
    assert begin == (both if first else both[::-1])
