"""Another sitecustomize, or usercustomize, later on the path: it runs as if the bundle were not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit import interpreters
from tests.unit.support import PATCHED, STOCK, USE_STEP, Done, Sandbox

SERVED = interpreters.each(interpreters.SERVED)
SHOW = """
import sys
module = sys.modules.get("sitecustomize")
keep = ("__name__", "__file__", "__package__", "__path__", "__doc__", "own")
print({name: str(value) for name, value in sorted(vars(module).items()) if name in keep} if module else "none")
print(getattr(module, "__spec__", None) and (module.__spec__.name, module.__spec__.origin, type(module.__loader__).__name__))
"""
# What is there, and what a reader of sys.modules then finds.
NEXT = {
    "nothing": {},
    "a module": {"sitecustomize.py": "'''Theirs.'''\nimport sys\nown = 1\nprint('theirs runs', __name__, __file__)\n"},
    "a module that looks at itself": {
        "sitecustomize.py": "import sys\nprint(sys.modules[__name__].__file__ == __file__, __spec__.name)\n"
    },
    "a package": {
        "sitecustomize/__init__.py": "from . import part\nown = part.number\nprint('theirs', __path__)\n",
        "sitecustomize/part.py": "number = 2\n",
    },
    "a folder without __init__": {"sitecustomize/part.py": "number = 2\n"},
    "one that raises": {"sitecustomize.py": "own = 3\nraise RuntimeError('theirs is broken')\n"},
    "one that lacks a module": {"sitecustomize.py": "import no_such_module\n"},
    "one that says it is not there": {"sitecustomize.py": "raise ImportError('no', name='sitecustomize')\n"},
    "one that does not parse": {"sitecustomize.py": "def own(\n"},
    "one that changes the path": {"sitecustomize.py": "import sys\nsys.path.append('/nowhere')\nown = sys.path[-1]\n"},
    "one that imports the engine": {"sitecustomize.py": "import fakeengine.worker\nown = fakeengine.worker.work(1)\n"},
    "one that puts a finder first": {
        "sitecustomize.py": "import sys\nclass Own:\n    find_spec = staticmethod(lambda *a: None)\nsys.meta_path.insert(0, Own)\n"
    },
    "one that replaces itself": {
        "sitecustomize.py": "import sys, types\nsys.modules['sitecustomize'] = types.ModuleType('sitecustomize', 'other')\n"
    },
    "usercustomize": {"usercustomize.py": "print('user', __name__, __file__)\n"},
    "usercustomize that raises": {"usercustomize.py": "raise RuntimeError('user is broken')\n"},
    "both": {"sitecustomize.py": "own = 6\nprint('site')\n", "usercustomize.py": "print('user')\n"},
}


def same(sandbox: Sandbox, code: str, *flags: str, python: str, **more: str) -> Done:
    """Exit code, stdout and stderr are those of a process without the bundle, of which they do not speak."""
    bare = sandbox.bare(code, *flags, python=python, **more)
    armed = sandbox.python(code, *flags, python=python, **more)
    # Only where nobody else has the name, ours has it.
    assert armed.out.replace(_ours(sandbox), "none\nNone\n") == bare.out
    assert (armed.code, armed.err) == (bare.code, bare.err)
    return armed


def _ours(sandbox: Sandbox) -> str:
    file = str(sandbox.bundle / "sitecustomize.py")
    kept = {"__doc__": "None", "__file__": file, "__name__": "sitecustomize", "__package__": ""}
    return f"{kept}\n{('sitecustomize', file, 'SourceFileLoader')}\n"


@pytest.mark.parametrize("version", SERVED)
@pytest.mark.parametrize("what", list(NEXT))
def test_the_next_one_runs_as_without_the_bundle(patched: Sandbox, what: str, version: str) -> None:
    python = str(interpreters.find(version))
    patched.write(NEXT[what])
    same(patched, SHOW, python=python)
    off = patched.python(SHOW, python=python, LIVEPATCH="off")
    assert off == patched.bare(SHOW, python=python)


@pytest.mark.parametrize(
    "source", ["import sys\nprint('bye')\nsys.exit(5)", "raise SystemExit", "raise KeyboardInterrupt"]
)
def test_one_that_exits_is_a_fatal_error_as_without_the_bundle(patched: Sandbox, source: str) -> None:
    """The interpreter prints its whole start: all the same, but that ours is on the way to theirs."""
    patched.write({"sitecustomize.py": source})
    bare, armed = patched.bare("print('unreached')"), patched.python("print('unreached')")
    assert bare.code
    assert (armed.code, armed.out) == (bare.code, bare.out)
    theirs = [line for line in armed.lines if line in bare.lines]
    assert theirs == bare.lines


@pytest.mark.parametrize("what", ["a module", "a package", "one that raises", "both", "usercustomize"])
def test_the_bundle_serves_all_the_same(patched: Sandbox, what: str) -> None:
    patched.write(NEXT[what])
    done = patched.python(USE_STEP)
    assert done.out.endswith(PATCHED)
    assert patched.reported()["state"] == "applied"


def test_verbose_tracebacks_name_the_next_ones_lines(patched: Sandbox) -> None:
    patched.write(NEXT["one that raises"])
    done = patched.python("print('goes on')", "-v")
    assert done.out == "goes on\n"
    output = done.err.replace("\n", " ")
    assert f'File "{patched.site}/sitecustomize.py", line 2' in output
    assert "RuntimeError: theirs is broken" in output


def test_the_next_one_that_imports_a_target_is_served(patched: Sandbox) -> None:
    patched.write({"sitecustomize.py": USE_STEP})
    done = patched.python("pass")
    assert (done.out, len(done.lines)) == (PATCHED, 1)


def test_one_that_comes_before_the_bundle_hides_it_as_any_other(patched: Sandbox) -> None:
    first = patched.write({"sitecustomize.py": "print('first')"}, patched.root / "first")
    done = patched.python(USE_STEP, path=[first, patched.bundle, patched.site])
    assert (done.out, done.err) == ("first\n[7]\n", "")


PUTS_ITSELF_FIRST = """\
import os
places = [place for place in os.environ["PYTHONPATH"].split(os.pathsep) if place != os.path.dirname(__file__)]
os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *places])
"""
"""As OpenTelemetry's does, which runs no other: its own children get it back in front."""


@pytest.mark.parametrize("slash", ["", "/"])
def test_children_are_served_though_the_next_one_puts_itself_first_for_them(patched: Sandbox, slash: str) -> None:
    other = patched.write({"sitecustomize.py": PUTS_ITSELF_FIRST}, patched.root / "other")
    child = f"import os, subprocess, sys; print(os.environ['PYTHONPATH'], flush=True)\n{USE_STEP}"
    again = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])\n{child}"
    path: list[Path | str] = [f"{patched.bundle}{slash}", other, patched.site]
    kept = ":".join(map(str, path))
    assert patched.python(again, path=path).out == f"{kept}\n{PATCHED}" * 2
    behind = [patched.root, *path]  # the image's own is in front
    moved = f"{path[0]}:{other}:{patched.root}:{patched.site}"
    assert patched.python(again, path=behind).out == f"{moved}\n{PATCHED}" * 2
    new = f"import os; os.environ['PYTHONPATH'] = '/new:' + os.environ['PYTHONPATH']\n{PUTS_ITSELF_FIRST}"
    patched.write({"sitecustomize.py": new}, other)
    assert patched.python(child, path=path).out == f"{path[0]}:{other}:/new:{patched.site}\n{PATCHED}"
    last = "import os; os.environ['PYTHONPATH'] += ':' + os.environ['PYTHONPATH'].partition(':')[0] + '/x'"
    patched.write({"sitecustomize.py": last}, other)
    assert patched.python(child, path=path).out == f"{kept}:{path[0]}/x\n{PATCHED}"
    patched.write({"sitecustomize.py": PUTS_ITSELF_FIRST}, other)
    # Where it was in front, or the bundle is off, it has what it asks for.
    for found, environ in (([other, *path], {}), (path, {"LIVEPATCH": "off"})):
        output = patched.python(child, path=found, **environ).out
        assert output.startswith(f"{other}:{path[0]}:")
        assert output.endswith(STOCK)


def test_children_that_get_their_path_from_ours_are_served(patched: Sandbox) -> None:
    """Torch's compile workers get PYTHONPATH from their parent's sys.path: the bundle must not have left it."""
    done = patched.python(f"""
        import os, subprocess, sys
        environ = {{**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}}
        print(subprocess.check_output([sys.executable, "-c", {USE_STEP!r}], env=environ, text=True), end="")
        """)
    assert done.out == PATCHED
