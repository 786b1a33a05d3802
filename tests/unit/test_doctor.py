"""`python BUNDLE ...`: a container that has the bundle and nothing else of ours answers for itself."""

from __future__ import annotations

import ast
import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.tools import in_bundle
from vllm_livepatch.tools.bundles import bundle, placing

from tests.unit import interpreters
from tests.unit.support import PATCHED, PYTHON, STOCK, USE_STEP, WORK, Done, Sandbox, finish
from tests.unit.test_changed_module import diff_patch


def ask(sandbox: Sandbox, *arguments: str, flags: tuple[str, ...] = (), python: str = PYTHON, **more: Any) -> Done:
    place = more.pop("place", sandbox.bundle)
    return finish([python, *flags, place, *arguments], sandbox.environ(**more), cwd=sandbox.root)


def doctor(sandbox: Sandbox, **more: Any) -> tuple[dict[str, str], list[str]]:
    """What failed, by the check's name; and the names of the warnings."""
    done = ask(sandbox, "doctor", "--json", **more)
    answer = json.loads(done.out)
    failed = {check["name"]: check["message"] for check in answer["checks"] if check["result"] == "failed"}
    assert (done.code, answer["patched"]) == (1 if failed else 0, not failed), done.err
    assert [line for line in done.lines if not line.startswith("vllm-livepatch: ")] == []
    return failed, [check["name"] for check in answer["checks"] if check["result"] == "warning"]


def test_the_text_says_the_same(patched: Sandbox) -> None:
    for path, last in (
        ([patched.bundle, patched.site], "processes that are started like this one are patched"),
        ([patched.site], "not fit to be patched: path; loaded"),
    ):
        checks = json.loads(ask(patched, "doctor", "--json", path=path).out)["checks"]
        done = ask(patched, "doctor", path=path)
        assert (done.code, done.err) == (0 if path[0] == patched.bundle else 1, "")
        assert done.out.splitlines() == [
            *(f"{one['result']:8} {one['name']}: {one['message']}" for one in checks),
            last,
        ]


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_all_is_well_and_the_process_is_patched(patched: Sandbox, version: str) -> None:
    python = str(interpreters.find(version))
    assert doctor(patched, python=python) == ({}, [])
    assert patched.python(USE_STEP, python=python).out == PATCHED


def test_what_it_says(patched: Sandbox) -> None:
    answer = json.loads(ask(patched, "doctor", "--json").out)
    assert answer["bundle"] == str(patched.bundle)
    assert (answer["version"], answer["digest"]) == (
        bundle.version(),
        bundle.digest(bundle.contents(patched.entries())),
    )
    assert (answer["python"], answer["packages"]) == (PYTHON, {"fakeengine": "1.0"})
    assert [(patch["name"], patch["verdict"]) for patch in answer["patches"]] == [("around", "needed")]
    checks = {check["name"]: check["message"] for check in answer["checks"]}
    assert checks["path"] == f"{patched.bundle}/sitecustomize.py is the first sitecustomize"
    assert checks["cache"] == str(patched.home / ".cache/vllm-livepatch")
    assert checks["state directory"] == str(patched.state)
    assert checks["patches"] == "fakeengine 1.0: would apply around"
    assert checks["wrapt"] == "not in this bundle: no patch asks for it"
    assert not patched.state.exists()  # it looks, and makes nothing


@pytest.mark.parametrize("name", ["LIVEPATCH", "LIVEPATCH_AROUND"])
def test_what_is_needed_and_off_is_not_called_not_needed(patched: Sandbox, name: str) -> None:
    off: dict[str, Any] = {name: "off"}
    checks = {one["name"]: one["message"] for one in json.loads(ask(patched, "doctor", "--json", **off).out)["checks"]}
    assert checks["patches"] == "fakeengine 1.0: would apply none: those that are needed here are off"


FLAGS = {("-I",): "-I", ("-E",): "-E", ("-S",): "-S", ("-I", "-S"): "-I -S"}


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_that_keep_the_bundle_out(patched: Sandbox, flags: tuple[str, ...]) -> None:
    path = f"import sys; sys.path.insert(0, {str(patched.site)!r})\n{USE_STEP}"
    assert patched.python(path, *flags).out == STOCK
    failed, _ = doctor(patched, flags=flags)
    assert f"was started with {FLAGS[flags]}: " in failed["interpreter"]
    assert "loaded" in failed


@pytest.mark.parametrize("given", ["", "elsewhere"])
def test_a_path_that_does_not_name_it(patched: Sandbox, given: str) -> None:
    failed, _ = doctor(patched, path=[patched.site / given])
    assert failed["loaded"] == "the bundle was not loaded in this process"
    assert failed["path"].endswith(f"does not name {patched.bundle}")
    assert doctor(patched, PYTHONPATH="")[0]["path"] == "PYTHONPATH is not set"


@pytest.mark.parametrize("named", ["bundle", "./bundle", ""])
def test_a_relative_path_that_names_it(patched: Sandbox, named: str) -> None:
    """A child that is started in another folder does not find it."""
    started = {"cwd": patched.bundle if named == "" else patched.root}
    environ = patched.environ(path=[named, patched.site])
    elsewhere = f"{USE_STEP}\nimport subprocess, sys\nsys.stdout.flush()\nsubprocess.run([sys.executable, '-c', {USE_STEP!r}], cwd='/')"
    assert finish([PYTHON, "-c", elsewhere], environ, **started).out == f"{PATCHED}{STOCK}"
    done = finish([PYTHON, patched.bundle, "doctor"], environ, **started)
    assert (done.code, done.out.splitlines()[-1]) == (1, "not fit to be patched: path")
    assert (
        f"failed   path: PYTHONPATH names the bundle as {named!r}, which a process that is started in another folder "
        f"does not find: name {patched.bundle}\n"
    ) in done.out
    both = patched.environ(path=[named, patched.bundle, patched.site])
    assert finish([PYTHON, patched.bundle, "doctor"], both, **started).code == 0


def test_a_guard_that_vllm_would_not_run(patched: Sandbox) -> None:
    assert " guard: " not in ask(patched, "doctor").out
    patched.write({"vllm_livepatch_guard.py": ""})
    chosen_by: tuple[dict[str, Any], ...] = ({}, {"VLLM_PLUGINS": "mine,livepatch"})
    for plugins in chosen_by:
        assert doctor(patched, **plugins) == ({}, [])
        assert "ok       guard: vllm-livepatch-guard is installed" in ask(patched, "doctor", **plugins).out
    for chosen in ("", "mine"):
        assert doctor(patched, VLLM_PLUGINS=chosen) == ({}, ["guard"])
    assert "VLLM_PLUGINS=mine leaves vllm-livepatch-guard out" in ask(patched, "doctor", VLLM_PLUGINS="mine").out


def test_another_sitecustomize_first_that_does_not_chain(patched: Sandbox) -> None:
    other = patched.write({"sitecustomize.py": "own = 1\n"}, patched.root / "other")
    path = [other, patched.bundle, patched.site]
    assert patched.python(USE_STEP, path=path).out == STOCK
    failed, _ = doctor(patched, path=path)
    assert failed["path"].startswith(
        f"{other}/sitecustomize.py comes before {patched.bundle}/sitecustomize.py and does not run the next"
    )
    assert "loaded" in failed


def test_another_sitecustomize_first_that_chains(patched: Sandbox) -> None:
    run_next = f"import runpy; runpy.run_path({str(patched.bundle / 'sitecustomize.py')!r})\n"
    other = patched.write({"sitecustomize.py": run_next}, patched.root / "other")
    path = [other, patched.bundle, patched.site]
    assert patched.python(USE_STEP, path=path).out == PATCHED
    failed, warnings = doctor(patched, path=path)
    assert (failed, warnings) == ({}, ["path"])


def test_another_sitecustomize_after_it(patched: Sandbox) -> None:
    patched.write({"sitecustomize.py": "own = 1\n"})
    assert doctor(patched) == ({}, [])
    assert f"{patched.site}/sitecustomize.py runs after it" in ask(patched, "doctor").out


@pytest.mark.parametrize("early", [False, True], ids=["", "a target is imported before"])
def test_another_bundle_serves(patched: Sandbox, early: bool) -> None:
    """It is not mixed with the one that is asked, which answers of itself."""
    other = patched.root / "other"
    placing.write_directory(bundle.contents(patched.entries()), other)
    patched.patch("more", [WORK])
    patched.generate()
    if early:
        patched.write({"sitecustomize.py": "import fakeengine.scheduler\n"})
    path = [other, patched.bundle, patched.site]
    failed, _ = doctor(patched, path=path)
    assert failed["loaded"] == f"another bundle serves this process: {other}"
    found = json.loads(ask(patched, "doctor", "--json", path=path).out)["patches"]
    assert [patch["name"] for patch in found] == ["around", "more"]


def test_a_bundle_without_its_package(patched: Sandbox) -> None:
    shutil.rmtree(patched.package)
    done = ask(patched, "doctor")
    assert (done.code, done.out) == (1, "")
    assert "is damaged" in done.err


@pytest.mark.parametrize("command", ["doctor", "status", "verify"])
def test_a_bundle_without_one_of_its_modules(patched: Sandbox, command: str) -> None:
    (patched.package / "tools/in_bundle/summary.py").unlink()
    done = ask(patched, command)
    assert (done.code, done.out, len(done.lines)) == (1, "", 1)
    assert done.err.startswith(f"vllm-livepatch: the bundle {patched.bundle} is damaged: ")


def cut(file: Path, kept: int, zeros: bool = False) -> None:
    """As a full disk, or a machine that lost its power, leaves a file."""
    data = file.read_bytes()
    file.write_bytes(data[:kept] + b"\0" * (len(data) - kept if zeros else 0))


def test_whichever_file_is_emptied_is_named(patched: Sandbox) -> None:
    """And a process that starts with such a bundle works, patched or not."""
    own = (file for file in patched.package.rglob("*") if file.suffix in (".py", ".json") and "wrapt" not in file.parts)
    files = [file for file in (patched.bundle / "sitecustomize.py", *sorted(own)) if file.stat().st_size]
    assert len(files) > 30
    for file, command in zip(files, itertools.cycle(("doctor", "verify")), strict=False):
        whole = file.read_bytes()
        cut(file, 0)
        done = ask(patched, "doctor" if file.name == "report.py" else command)  # which reads it in a thread
        assert (done.code, "Traceback" in done.err) == (1, False), (command, done)
        assert f"{file.relative_to(patched.bundle)} was changed" in done.out + done.err
        if "tools" not in file.parts:  # which a process has no use for
            done = patched.python(USE_STEP)
            assert (done.code, done.out in (STOCK, PATCHED)) == (0, True), (file, done.err)
        file.write_bytes(whole)
    patched.generate()  # which removes the bytecode of what was emptied
    assert doctor(patched) == ({}, [])


def test_a_file_that_is_cut_off_is_named(patched: Sandbox) -> None:
    names = ("tools/in_bundle/doctor.py", "tools/in_bundle/command.py", "catalogue.json", "sitecustomize/facts.py")
    for name, zeros in itertools.product(names, (False, True)):
        file = patched.package / name
        whole = file.read_bytes()
        cut(file, len(whole) // 2, zeros=zeros)
        for command in ("doctor", "verify"):
            done = ask(patched, command)
            assert (done.code, "Traceback" in done.err) == (1, False), done.err
            assert f"{file.relative_to(patched.bundle)} was changed" in done.out + done.err
        file.write_bytes(whole)


def test_a_bundle_whose_manifest_is_damaged_too(patched: Sandbox) -> None:
    cut(patched.package / "tools/in_bundle/doctor.py", 0)
    cut(patched.bundle / "manifest.json", 0)
    done = ask(patched, "doctor")
    assert (done.code, done.out, len(done.lines)) == (1, "", 1)
    assert "is damaged: " in done.err
    assert "manifest.json: " in done.err


def test_damage_from_a_zip(patched: Sandbox) -> None:
    contents = bundle.contents(patched.entries())
    (emptied,) = (name for name in contents if name.endswith("/tools/in_bundle/doctor.py"))
    place = patched.root / "livepatch.zip"
    placing.write_zip({**contents, emptied: b""}, place)
    done = ask(patched, "doctor", place=place, path=[place, patched.site])
    assert (done.code, done.out, len(done.lines)) == (1, "", 1)
    assert f"{emptied} was changed" in done.err


@pytest.mark.parametrize("value", ["off", "0", "banana"])
def test_turned_off(patched: Sandbox, value: str) -> None:
    failed, _ = doctor(patched, LIVEPATCH=value)
    assert ("it counts as off" if value == "banana" else "LIVEPATCH is off: nothing is patched") in failed["LIVEPATCH"]


def test_words_that_mean_nothing(patched: Sandbox) -> None:
    wrong = {"LIVEPATCH_AROUND": "banana", "LIVEPATCH_AROUDN": "off"}
    assert doctor(patched, **wrong) == ({}, ["LIVEPATCH"])
    failed, _ = doctor(patched, LIVEPATCH="strict", **wrong)
    assert patched.python(USE_STEP, LIVEPATCH="strict", **wrong).code == 78
    assert list(failed) == ["LIVEPATCH"]
    assert "LIVEPATCH_AROUDN" in failed["LIVEPATCH"]


def test_a_damaged_bundle(patched: Sandbox) -> None:
    (patched.package / "patches/around/wrappers.py").write_text("")
    failed, _ = doctor(patched)
    assert "_vllm_livepatch/patches/around/wrappers.py was changed" in failed["bundle"]


def test_nothing_to_patch_is_installed(patched: Sandbox) -> None:
    failed, _ = doctor(patched, path=[patched.bundle])
    assert failed == {"patches": "none of the packages that the patches are for is installed here (fakeengine)"}


def test_a_wanted_patch_that_would_not_be_applied(patched: Sandbox) -> None:
    patched.write({"fakeengine/scheduler.py": "class Scheduler:\n    def step(self, number): return 0\n"})
    failed, _ = doctor(patched)
    assert failed["patches"].startswith("around would not be applied (drifted): ")
    done = patched.python("import fakeengine.scheduler")
    assert patched.reported()["detail"] in failed["patches"]
    assert done.code == 0
    assert doctor(patched, LIVEPATCH_AROUND="off") == ({}, [])


def test_what_was_imported_earlier(patched: Sandbox) -> None:
    """By a `.pth` file, or by a sitecustomize that runs after ours: the patch is there or it failed, which is known."""
    patched.write({"sitecustomize.py": "import fakeengine.scheduler\n"})
    failed, warnings = doctor(patched)
    assert (failed, warnings) == ({}, ["imported earlier"])
    patched.write(
        {
            "sitecustomize.py": "import fakeengine.scheduler\nfakeengine.scheduler.Scheduler.step = print\n",
            "fakeengine/scheduler.py": "class Scheduler:\n    def step(self, number): return [number]\nScheduler.step = print\n",
        }
    )
    patched.patch()
    patched.generate()
    failed, warnings = doctor(patched)
    assert failed["imported earlier"].startswith("around failed here (")


def test_places_that_cannot_be_written(patched: Sandbox) -> None:
    """Patched all the same: neither a report nor a cache is needed for that."""
    patched.state.write_text("")
    failed, warnings = doctor(
        patched, HOME="/proc/none", TMPDIR="/proc/none", LIVEPATCH_STATE_DIR=f"{patched.state}/below"
    )
    assert (failed, "state directory" in warnings) == ({}, True)


def test_from_a_zip(patched: Sandbox) -> None:
    place = patched.root / "livepatch.zip"
    placing.write_zip(bundle.contents(patched.entries(), {"_wrappers.another.so": b""}), place)
    assert doctor(patched, place=place, path=[place, patched.site]) == ({}, [])
    assert "in pure Python" in ask(patched, "doctor", place=place, path=[place, patched.site]).out
    assert ask(patched, "verify", place=place, path=[place]).code == 0


@pytest.mark.parametrize("version", interpreters.each(interpreters.UNSERVED))
def test_an_interpreter_that_is_not_served_is_refused_by_name(patched: Sandbox, version: str) -> None:
    done = ask(patched, "doctor", python=str(interpreters.find(version)))
    assert (done.code, done.out) == (1, "")
    assert done.err == f"vllm-livepatch: this bundle does not serve Python {version}: nothing is patched\n"


def test_verify(patched: Sandbox) -> None:
    done = ask(patched, "verify")
    assert (done.code, done.err) == (0, "")
    assert "all as written" in done.out
    (patched.bundle / "more.py").write_text("")
    assert ask(patched, "verify").out == "more.py was added\n"
    (patched.bundle / "more.py").unlink()
    digest = bundle.digest(bundle.contents(patched.entries()))
    assert ask(patched, "verify", "--digest", digest).code == 0
    other = f"{digest[:-1]}{'1' if digest.endswith('0') else '0'}"
    assert ask(patched, "verify", "--digest", other).code == 1
    for none in (digest[:-1], f"{digest}0", digest.upper(), digest.partition(":")[2], ""):
        done = ask(patched, "verify", "--digest", none)
        assert (done.code, done.out, "is not sha256: and 64 hexadecimal digits" in done.err) == (2, "", True), none
    (patched.bundle / "more.py").write_text("")
    done = ask(patched, "verify", "--json")
    assert done.code == 1
    assert json.loads(done.out)["differences"] == ["more.py was added"]
    (patched.bundle / "manifest.json").unlink()
    done = ask(patched, "verify")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"vllm-livepatch: {patched.bundle} is not a bundle: it has no manifest.json\n"


def test_check(patched: Sandbox) -> None:
    done = ask(patched, "check", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == {
        "packages": {"fakeengine": "1.0"},
        "patches": json.loads(ask(patched, "doctor", "--json").out)["patches"],
    }
    assert "needed" in ask(patched, "check").out
    assert ask(patched, "check", path=[patched.bundle]).code == 2
    patched.write({"fakeengine/scheduler.py": "class Scheduler:\n    def step(self, number): return 0\n"})
    assert ask(patched, "check").code == 1


def test_check_of_a_diff(sandbox: Sandbox) -> None:
    """Decided on as in a process: also whether it has a place in the text, which a comment may have taken."""
    diff_patch(sandbox, {"fakeengine/scheduler.py": ("return [number]", "return ['changed', number]")})
    sandbox.generate()
    assert json.loads(ask(sandbox, "check", "--json").out)["patches"][0]["verdict"] == "needed"
    file = sandbox.site / "fakeengine/scheduler.py"
    file.write_text(file.read_text("utf-8").replace("return [number]", "return [number]  # a number"), "utf-8")
    done = ask(sandbox, "check", "--json")
    (answer,) = json.loads(done.out)["patches"]
    assert (done.code, answer["verdict"]) == (1, "drifted")
    assert "has no place here" in answer["detail"]


def test_a_part_of_it_is_no_program() -> None:
    """Of a `__main__.py` that was cut off anywhere, as a full disk does it, Python says so: no exit 0 for an answer."""
    text = (Path(next(iter(in_bundle.__path__))) / "main.py").read_text("utf-8")
    for length in range(len("try"), text.index("except KeyboardInterrupt")):
        with pytest.raises(SyntaxError):
            ast.parse(text[:length])


def test_the_bundled_commands_need_nothing_but_the_standard_library() -> None:
    for file in Path(next(iter(in_bundle.__path__))).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                top = name.partition(".")[0]
                assert top in sys.stdlib_module_names or (file.name == "main.py" and top == "_vllm_livepatch"), (
                    file,
                    name,
                )


def test_bad_input(patched: Sandbox) -> None:
    for arguments in ((), ("frobnicate",), ("status", "--state-dir", "/no/such/place"), ("doctor", "--colour")):
        done = ask(patched, *arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert done.err
    assert os.path.isdir(patched.bundle)
