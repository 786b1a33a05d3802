"""The five functions for projects that start vLLM themselves."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.unit.support import STEP, Done, Sandbox, finish

ROOT = Path(__file__).resolve().parents[2]
WORKER = "fakeengine.worker:work"
WORK = "from fakeengine.scheduler import Scheduler\nprint(Scheduler().step(7))\n"


def run(sandbox: Sandbox, code: str, **more: str) -> Done:
    """In an interpreter that has vllm-livepatch installed, and no bundle on its path."""
    environ = sandbox.environ(path=[sandbox.site], **more)
    return finish([sys.executable, "-c", f"import vllm_livepatch as livepatch\n{code}"], environ, cwd=sandbox.root)


def test_it_is_the_standard_library_alone(sandbox: Sandbox) -> None:
    code = "import sys\nprint(sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    without = finish([sys.executable, "-c", code], sandbox.environ(path=[]), cwd=sandbox.root).out
    assert eval(run(sandbox, code).out) == sorted({*eval(without), "vllm_livepatch"})
    assert run(sandbox, "print(sorted(livepatch.__all__))").out == (
        "['applied', 'arm', 'bundle', 'report', 'require']\n"
    )


def test_a_process_arms_itself_and_what_it_starts(sandbox: Sandbox) -> None:
    sandbox.patch()
    code = f"""
place = livepatch.bundle(patches=["around"], patch_dirs=[{str(sandbox.patches)!r}])
print(livepatch.applied("around"), livepatch.report()["armed"])
print(livepatch.arm(place), livepatch.arm(place))
livepatch.require("around")
{WORK}
print(livepatch.applied("around"), livepatch.report()["packages"], livepatch.report()["bundle"] == str(place))
livepatch.require("around")
import subprocess, sys
print(subprocess.run([sys.executable, "-c", {WORK!r}], capture_output=True, text=True).stdout)
"""
    done = run(sandbox, code)
    assert done.out.splitlines()[:2] == ["False False", "True True"], done.err
    assert done.out.splitlines()[2:] == [
        "['patched', 7]",
        "True {'fakeengine': '1.0'} True",
        "['patched', 7]",
        "",
    ]


def test_an_image_with_a_sitecustomize_of_its_own(sandbox: Sandbox) -> None:
    sandbox.patch()
    sandbox.write({"sitecustomize.py": "print('theirs')\n"})
    made = f"livepatch.bundle('mine', patches=['around'], patch_dirs=[{str(sandbox.patches)!r}])"
    done = run(sandbox, f"print(livepatch.arm({made}))\n{WORK}")
    assert done.out == "theirs\nTrue\n['patched', 7]\n"
    assert (sandbox.root / "mine" / "manifest.json").is_file()


def test_off_is_off(sandbox: Sandbox) -> None:
    sandbox.patch()
    made = f"livepatch.bundle(patches=['around'], patch_dirs=[{str(sandbox.patches)!r}])"
    done = run(sandbox, f"import os\nprint(livepatch.arm({made}), os.environ['PYTHONPATH'])\n{WORK}", LIVEPATCH="off")
    assert done.out == f"False {sandbox.site}\n[7]\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("livepatch.arm('nowhere')", "nowhere does not exist"),
        ("livepatch.require('around')", "around is required, and no bundle serves this process"),
        ("livepatch.bundle(patches=['nothing'])", "nothing"),
        ("livepatch.arm(MADE)\nlivepatch.arm('nowhere')", "nowhere does not exist"),
        ("livepatch.arm(MADE)\nlivepatch.arm(livepatch.bundle('other'))", "serves this process already"),
        ("livepatch.arm(MADE)\nlivepatch.require('other')", "other is required, and is not in"),
        (f"livepatch.arm(MADE)\n{WORK}livepatch.require('around')", "around is required, and is skipped here (off)"),
    ],
)
def test_what_cannot_be_done_is_one_line(sandbox: Sandbox, code: str, message: str) -> None:
    sandbox.patch(targets=[STEP])
    made = f"livepatch.bundle(patches=['around'], patch_dirs=[{str(sandbox.patches)!r}])"
    done = run(sandbox, code.replace("MADE", made), LIVEPATCH_AROUND="off")
    assert done.code == 1
    (said,) = (line for line in done.lines if line.startswith("vllm_livepatch.tools.errors.UserError: "))
    assert message in said


def test_a_place_that_python_looked_at_before_it_was_there(sandbox: Sandbox) -> None:
    """As a mount, or a cache that is filled later."""
    sandbox.patch()
    place = sandbox.root / "later"
    made = f"livepatch.bundle({str(place)!r}, patches=['around'], patch_dirs=[{str(sandbox.patches)!r}])"
    environ = sandbox.environ(path=[place, sandbox.site])
    code = f"import vllm_livepatch as livepatch\nprint(livepatch.arm({made}))\n{WORK}"
    done = finish([sys.executable, "-c", code], environ, cwd=sandbox.root)
    assert done.out == "True\n['patched', 7]\n", done.err


@pytest.mark.parametrize("damage", ["generation", "entry", "catalogue"])
def test_a_damaged_bundle_is_not_armed(sandbox: Sandbox, damage: str) -> None:
    sandbox.patch()
    sandbox.generate()
    if damage == "generation":
        shutil.rmtree(sandbox.package.parent)
    elif damage == "entry":
        (sandbox.bundle / "sitecustomize.py").write_text("def (")
    else:
        (sandbox.package / "catalogue.json").write_text("x")
    done = run(sandbox, f"livepatch.arm({str(sandbox.bundle)!r})", LIVEPATCH="strict")
    assert (done.code, "is not what generate wrote" in done.err) == (1, True)


def test_what_is_required_is_not_there_where_the_runtime_could_not_be_made(sandbox: Sandbox) -> None:
    """The bundle was damaged after it was armed."""
    sandbox.patch()
    sandbox.generate()
    code = f"""
livepatch.arm({str(sandbox.bundle)!r})
open({str(sandbox.package / "catalogue.json")!r}, "w").write("x")
{WORK}
livepatch.require("around")
"""
    done = run(sandbox, code)
    assert (done.code, done.out) == (1, "[7]\n")
    assert "UserError: around is required, and the bundle cannot be used" in done.err


def test_what_is_gone_is_not_waited_for(sandbox: Sandbox) -> None:
    """Where no other target is imported, the process has no report that would say so."""
    sandbox.patch()
    sandbox.patch("other", [WORKER])
    sandbox.generate()
    code = f"livepatch.arm({str(sandbox.bundle)!r})\nlivepatch.require('around')\nimport fakeengine\n"
    assert run(sandbox, f"{code}livepatch.require('around')").code == 0, "its module is not imported yet"
    (sandbox.site / "fakeengine/scheduler.py").rename(sandbox.site / "fakeengine/moved.py")
    done = run(sandbox, f"{code}livepatch.require('around')")
    assert "UserError: around is required, and fakeengine has no fakeengine.scheduler here" in done.err
    assert run(sandbox, f"{code}livepatch.require('other')").code == 0


def test_a_version_can_be_required(sandbox: Sandbox) -> None:
    sandbox.patch(version=3)
    sandbox.generate()
    armed = f"livepatch.arm({str(sandbox.bundle)!r})\n"
    for before in (armed, armed + WORK):
        assert run(sandbox, f"{before}livepatch.require('around@3')").code == 0
        assert "around is of version 3" in run(sandbox, f"{before}livepatch.require('around@4')").err


def test_threads_that_arm_at_once(sandbox: Sandbox) -> None:
    sandbox.patch()
    sandbox.generate()
    code = f"""
import os, threading
threads = [threading.Thread(target=livepatch.arm, args=({str(sandbox.bundle)!r},)) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(os.environ["PYTHONPATH"].split(os.pathsep).count({str(sandbox.bundle)!r}))
{WORK}"""
    assert run(sandbox, code).out == "1\n['patched', 7]\n"
