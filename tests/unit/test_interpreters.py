"""Interpreters that the bundle does not support start as if it were not there; those that it supports are served.

Tests in those that this machine lacks are skipped, counted and named at the end of pytest's output.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from vllm_livepatch import sitecustomize
from vllm_livepatch.tools import in_bundle
from vllm_livepatch.tools.bundles import extensions
from vllm_livepatch.tools.compatibility import check
from vllm_livepatch.tools.in_bundle import verifying

from tests.unit import interpreters
from tests.unit.support import PYTHON, STEP, WORK, Done, Sandbox, finish

UNSERVED = interpreters.each(interpreters.UNSERVED)
SERVED = interpreters.each(interpreters.SERVED)
PATHS = "[finder.__name__ if hasattr(finder, '__name__') else type(finder).__name__ for finder in sys.meta_path]"
COMMANDS = {
    "pass": ["-c", "pass"],
    "modules": ["-c", f"import sys; print([name for name in sorted(sys.modules) if 'custom' in name], {PATHS})"],
    "engine": ["-c", "from fakeengine.scheduler import Scheduler; print(Scheduler().step(7))"],
    "error": ["-c", "import fakeengine.scheduler\nraise RuntimeError('told')"],
    "script": ["failing.py"],
    "missing": ["-c", "import no_such_module"],
    "verbose": ["-W", "error", "-c", "import sys; print(sys.flags, sys.argv)"],
    "isolated": ["-E", "-s", "-c", "import sys; print(sys.argv)"],
    "no site": ["-S", "-c", "import sys; print(sys.argv)"],
    "exit code": ["-c", "import sys; sys.exit(7)"],
    "module": ["-m", "compileall", "-q", "failing.py"],
}
NEXT = {
    "none": {},
    "sitecustomize": {"sitecustomize.py": "import sys\nown = 1\nsys.stdout.write('theirs %s\\n' % __name__)\n"},
    "package": {"sitecustomize/__init__.py": "from . import part\n", "sitecustomize/part.py": "print('part')\n"},
    "raises": {"sitecustomize.py": "raise RuntimeError('theirs is broken')\n"},
    "usercustomize": {"usercustomize.py": "import sys\nsys.stderr.write('user\\n')\n"},
}


def run(sandbox: Sandbox, version: str, arguments: list[str], *, bundle: bool, **more: str) -> Done:
    path = [sandbox.bundle, sandbox.site] if bundle else [sandbox.site]
    environ = sandbox.environ(path=path, PYTHONDONTWRITEBYTECODE="1", **more)
    return finish([str(interpreters.find(version)), *arguments], environ, cwd=sandbox.root)


def test_at_least_one_supported_interpreter_is_there() -> None:
    assert interpreters.found(interpreters.SERVED), f"none of {', '.join(interpreters.SERVED)}"
    assert [getattr(one, "values", (one,))[0] for one in SERVED] == list(interpreters.SERVED), (
        "what is missing is skipped"
    )


@pytest.mark.parametrize("version", UNSERVED)
@pytest.mark.parametrize("what", list(COMMANDS))
def test_an_unsupported_interpreter_starts_unchanged(patched: Sandbox, what: str, version: str) -> None:
    """Also under strict: what does not serve has nothing to end."""
    (patched.root / "failing.py").write_text("def f():\n    return 1 / 0\nf()\n")
    bare = run(patched, version, COMMANDS[what], bundle=False)
    assert run(patched, version, COMMANDS[what], bundle=True) == bare
    assert run(patched, version, COMMANDS[what], bundle=True, LIVEPATCH="strict") == bare
    assert not patched.state.exists()


@pytest.mark.parametrize("version", UNSERVED)
@pytest.mark.parametrize("what", list(NEXT))
def test_the_next_sitecustomize_runs_in_an_unsupported_interpreter(patched: Sandbox, what: str, version: str) -> None:
    patched.write(NEXT[what])
    show = [
        "-c",
        "import sys; module = sys.modules.get('sitecustomize'); print(module and module.__file__, hasattr(module, 'own'))",
    ]
    bare = run(patched, version, show, bundle=False)
    assert run(patched, version, show, bundle=True) == bare
    assert bare.code == 0


@pytest.mark.parametrize("version", UNSERVED + SERVED)
@pytest.mark.parametrize("what", ["none", "sitecustomize", "package", "raises"])
@pytest.mark.parametrize("bundle", ["bundle", "bundle.zip"])
def test_the_next_sitecustomize_runs_that_is_in_a_zip_file(
    patched: Sandbox, what: str, bundle: str, version: str
) -> None:
    source = patched.write(NEXT[what] or {"other.py": ""}, patched.root / "next")
    next_one = shutil.make_archive(str(patched.root / "next"), "zip", source)
    shutil.make_archive(str(patched.bundle), "zip", patched.bundle)
    show = (
        "import sys; print(sorted(vars(sys.modules.get('sitecustomize', 7)))) if 'sitecustomize' in sys.modules else 0"
    )
    done = [
        finish(
            [str(interpreters.find(version)), "-c", show],
            patched.environ(path=[*own, next_one, patched.site], PYTHONDONTWRITEBYTECODE="1", LIVEPATCH="off"),
            cwd=patched.root,
        )
        for own in ([], [patched.root / bundle])
    ]
    assert done[1] == done[0]
    assert done[0].code == 0
    assert ("theirs" in done[0].out, done[0].err != "") == (what == "sitecustomize", what == "raises")


@pytest.mark.parametrize("version", UNSERVED)
def test_the_zip_leaves_an_unsupported_interpreter_unchanged(patched: Sandbox, version: str) -> None:
    archive = Path(shutil.make_archive(str(patched.root / "bundle"), "zip", patched.bundle))
    python = str(interpreters.find(version))
    for arguments in (COMMANDS["modules"], COMMANDS["engine"], COMMANDS["error"]):
        bare, armed = (
            finish([python, *arguments], patched.environ(path=path), cwd=patched.root)
            for path in ([patched.site], [archive, patched.site])
        )
        assert armed == bare


@pytest.mark.parametrize("version", UNSERVED)
def test_an_interpreter_that_writes_bytecode_into_the_bundle_does_no_harm(patched: Sandbox, version: str) -> None:
    """2.7 writes it beside the source, where a newer one must not take it for its own."""
    finish([str(interpreters.find(version)), "-c", "pass"], patched.environ(), cwd=patched.root)
    assert verifying.verified(patched.bundle).differences == []
    assert (
        patched.python("from fakeengine.scheduler import Scheduler; print(Scheduler().step(7))").out
        == "['patched', 7]\n"
    )


@pytest.mark.parametrize("version", SERVED)
def test_a_supported_interpreter_is_served(sandbox: Sandbox, version: str) -> None:
    sandbox.patch()
    sandbox.patch("other", [STEP, WORK])
    sandbox.generate()
    code = "import fakeengine.scheduler as one, fakeengine.worker as two; print(one.Scheduler().step(7), two.work(8))"
    done = run(sandbox, version, ["-c", code], bundle=True)
    assert (done.code, done.out) == (0, "['patched', 'patched', 7] ['patched', 8]\n"), done.err
    assert len(done.lines) == 1
    for name in ("around", "other"):
        assert (sandbox.reported(name)["state"], sandbox.reported(name)["verdict"]) == ("applied", "needed")


OTHERWISE = """
import runpy, sys
sys.version_info = {version}
sys.argv = ["livepatch", "doctor"]
{then}
"""
"""A process of this interpreter, which takes itself for another version from here on: no later one is at hand."""


@pytest.mark.parametrize(("version", "armed"), [((3, 9), False), ((3, 10), True), ((3, 14), True), ((3, 15), False)])
def test_versions_that_no_machine_here_has(patched: Sandbox, version: tuple[int, int], armed: bool) -> None:
    """The entry puts no finder in place, and `doctor` says that nothing is patched."""
    entry = patched.bundle / "sitecustomize.py"
    finders = f"print('armed', any(name == 'LivepatchFinder' for name in {PATHS}))"
    version_info = (*version, 0, "final", 0)
    code = OTHERWISE.format(
        version=version_info, then=f"try:\n    runpy.run_path({str(entry)!r})\nexcept ImportError:\n    pass\n{finders}"
    )
    done = finish([PYTHON, "-c", code], patched.environ(path=[patched.site]), cwd=patched.root)
    assert (done.code, done.out, done.err) == (0, f"armed {armed}\n", "")
    code = OTHERWISE.format(version=version_info, then=f"runpy.run_path({str(patched.bundle)!r}, run_name='__main__')")
    done = finish([PYTHON, "-c", code], patched.environ(), cwd=patched.root)
    refused = f"vllm-livepatch: this bundle does not serve Python {version[0]}.{version[1]}: nothing is patched\n"
    assert (done.err == refused) == (not armed)
    assert done.code == (0 if armed else 1), done


@pytest.mark.parametrize("version", [(2, 9), (3, 9), (3, 10), (3, 15)])
def test_what_comes_before_the_bundle_is_not_run_again(patched: Sandbox, version: tuple[int, int]) -> None:
    """Another `sitecustomize` may run ours: the next one is looked for behind it, and the path is as it was."""
    before = patched.write({"sitecustomize.py": "print('again')\n"}, patched.root / "before")
    following = patched.write({"sitecustomize.py": "print('the next one')\n"}, patched.root / "next")
    path = [str(before), str(patched.bundle), str(following)]
    then = f"sys.path[:0] = {path!r}\nrunpy.run_path({str(patched.bundle / 'sitecustomize.py')!r})\n"
    then += f"print(sys.path[:3] == {path!r}, sys.modules['sitecustomize'].__file__)"
    code = OTHERWISE.format(version=(*version, 0, "candidate", 2), then=then)
    done = finish([PYTHON, "-S", "-c", code], patched.environ(path=[]), cwd=patched.root)
    assert (done.code, done.out) == (0, f"the next one\nTrue {following}/sitecustomize.py\n"), done.err


def test_all_places_serve_the_same_versions() -> None:
    """They cannot import each other: the entry and the bundle's main module parse on Python 2.7."""
    oldest, newest = check.SERVED
    text = f"({oldest[0]}, {oldest[1]}) <= sys.version_info[:2] <= ({newest[0]}, {newest[1]})"
    for package, name in ((sitecustomize, "entry.py"), (sitecustomize, "vllm_plugin.py"), (in_bundle, "main.py")):
        assert Path(next(iter(package.__path__)), name).read_text("utf-8").count(text) == 1, name
    assert tuple(f"3.{minor}" for minor in range(oldest[1], newest[1] + 1)) == extensions.SERVED
    assert interpreters.SERVED == extensions.SERVED
