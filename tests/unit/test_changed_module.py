"""A module as a diff makes it, in fresh interpreters: what runs, what is shown of it, what happens when it fails."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import marshal
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from vllm_livepatch.sitecustomize import changed_module
from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.compatibility import check
from vllm_livepatch.tools.errors import UserError

from tests.unit import interpreters
from tests.unit.support import PYTHON, Cli, Done, Sandbox, finish

SCHEDULER = "fakeengine.scheduler"
ENGINE = {
    "fakeengine/scheduler.py": """\
        class Scheduler:
            def step(self, number):
                return [number]

            def free(self):
                return "freed"


        def module_function():
            return "stock"
        """,
    "fakeengine/worker.py": """\
        from fakeengine.scheduler import Scheduler


        def work(item):
            return Scheduler().step(item)
        """,
    "fakeengine/third.py": "VALUE = 'stock'\n",
    "fakeengine/main.py": "if __name__ == '__main__':\n    print('stock')\n",
}
STEP = {"fakeengine/scheduler.py": ("return [number]", 'return ["changed", number]')}
USE = "from fakeengine.scheduler import Scheduler; print(Scheduler().step(7))"
FURTHER_DOWN = {"fakeengine/scheduler.py": ('"stock"', '"changed too"')}
USE_BOTH = f"{USE}\nimport fakeengine.scheduler as m; print(m.module_function())"
STOCK, CHANGED = "[7]\n", "['changed', 7]\n"
RAISES = 'raise RuntimeError("as changed")'


@pytest.fixture
def engine(sandbox: Sandbox) -> Sandbox:
    """An engine of several modules, which no patch is for, yet."""
    sandbox.write(ENGINE)
    return sandbox


def text_of(sandbox: Sandbox, file: str) -> str:
    return (sandbox.site / file).read_text("utf-8")


def changed_text(sandbox: Sandbox, file: str, change: tuple[str, str]) -> str:
    before = text_of(sandbox, file)
    assert before.count(change[0]) == 1
    return before.replace(*change)


def diff_patch(
    sandbox: Sandbox,
    changes: Mapping[str, tuple[str, str]],
    name: str = "diffed",
    added: Mapping[str, str] | None = None,
    **facts: Any,
) -> Path:
    """Write a patch folder whose diff replaces one text by another in each file, and adds files."""
    lines: list[str] = []
    for file, change in changes.items():
        before, after = text_of(sandbox, file), changed_text(sandbox, file, change)
        lines += difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{file}", f"b/{file}")
    for file, text in (added or {}).items():
        lines += [f"diff --git a/{file} b/{file}\n", "new file mode 100644\n"]
        if text:
            lines += ["--- /dev/null\n", f"+++ b/{file}\n", f"@@ -0,0 +1,{text.count(chr(10))} @@\n"]
            lines += [f"+{line}" for line in text.splitlines(True)]
    targets = [module_of(file) for file in changes]
    written = {
        "title": f"{name}, for the tests",
        "package": "fakeengine",
        "diff": "change.diff",
        "targets": targets,
        "added": [module_of(file) for file in added or {}],
        "variant": [{"releases": ["1.0"], "code": sandbox.fingerprints(*targets)}],
        **facts,
    }
    folder = sandbox.patches / name.replace("-", "_")
    folder.mkdir(parents=True)
    (folder / "change.diff").write_text("".join(lines), "utf-8")
    (folder / "patch.toml").write_text(tomli_w.dumps(written), "utf-8")
    return folder


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def state(sandbox: Sandbox, name: str = "diffed") -> tuple[str, str | None]:
    reported = sandbox.reported(name)
    return reported["state"], reported["reason"]


def cached(sandbox: Sandbox, ending: str) -> list[Path]:
    return sorted(sandbox.home.rglob(f"*{ending}"))


@pytest.fixture
def changed(engine: Sandbox) -> Sandbox:
    """The engine, and a bundle with a diff that marks what `Scheduler.step` returns."""
    diff_patch(engine, STEP)
    engine.generate()
    return engine


# What runs


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_the_changed_source_runs(changed: Sandbox, version: str) -> None:
    done = changed.python(USE, python=str(interpreters.find(version)))
    assert (done.code, done.out) == (0, CHANGED)
    assert len(done.lines) == 1, done.err
    assert state(changed) == ("applied", None)
    assert changed.reported("diffed")["targets"] == [SCHEDULER]


def test_what_is_on_disk_stays_as_it_is(changed: Sandbox) -> None:
    def site() -> dict[str, bytes]:
        return {str(file): file.read_bytes() for file in changed.site.rglob("*") if file.is_file()}

    before = site()
    assert changed.python(USE).out == CHANGED
    after = site()
    new = {Path(file).name.split(".")[0] for file in set(after) - set(before)}
    assert new <= {"__init__"}, "no bytecode of the changed text beside the module"
    assert {file: after[file] for file in before} == before
    assert changed.bare(USE).out == STOCK


@pytest.mark.parametrize("variable", ["LIVEPATCH", "LIVEPATCH_DIFFED"])
def test_it_can_be_turned_off(changed: Sandbox, variable: str) -> None:
    assert changed.python(USE, **{variable: "off"}).out == STOCK


def test_a_zip_file_of_a_bundle(changed: Sandbox) -> None:
    place = changed.root / "bundle.zip"
    placing.write_zip(bundle.contents(changed.entries()), place)
    assert changed.python(USE, path=[place, changed.site]).out == CHANGED


def test_as_a_program(engine: Sandbox) -> None:
    diff_patch(engine, {"fakeengine/main.py": ("'stock'", "'changed', __file__")})
    engine.generate()
    done = finish([sys.executable, "-m", "fakeengine.main"], engine.environ())
    assert done.out.split() == ["changed", str(engine.site / "fakeengine" / "main.py")]


def test_in_spawned_processes(changed: Sandbox) -> None:
    changed.write(
        {
            "run.py": f"import multiprocessing as m\ndef f():\n    {USE}\nif __name__ == '__main__':\n    p = m.\
get_context('spawn').Process(target=f); p.start(); p.join()\n"
        }
    )
    assert finish([sys.executable, str(changed.site / "run.py")], changed.environ()).out == CHANGED


def test_reload(changed: Sandbox) -> None:
    changed.patch("around", [f"{SCHEDULER}:Scheduler.step"], variant=[wrapped_variant(changed, STEP)])
    changed.generate()
    done = changed.python(f"{USE}\nimport importlib, sys\nimportlib.reload(sys.modules['{SCHEDULER}'])\n{USE}")
    assert done.out == "['patched', 'changed', 7]\n" * 2
    assert state(changed) == state(changed, "around") == ("applied", None)


def test_threads_that_import_at_once(engine: Sandbox) -> None:
    """Eight threads import the modules of a change in different orders, in twelve processes."""
    changes = {**STEP, "fakeengine/third.py": ("'stock'", "'changed'"), "fakeengine/worker.py": ("(item)\n", "(8)\n")}
    changes["fakeengine/worker.py"] = ("return Scheduler().step(item)", "return Scheduler().step(item + 1)")
    diff_patch(engine, changes)
    engine.generate()
    code = """
        import importlib, threading
        names = ["fakeengine.worker", "fakeengine.scheduler", "fakeengine.third"]
        gate = threading.Barrier(8)
        def run(turn):
            gate.wait()
            for name in names[turn % 3 :] + names[: turn % 3]:
                importlib.import_module(name)
        threads = [threading.Thread(target=run, args=(turn,)) for turn in range(8)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        from fakeengine import third, worker
        print(worker.work(6), third.VALUE)
        """
    for _ in range(12):
        done = engine.python(code)
        assert (done.code, done.out) == (0, "['changed', 7] changed\n"), done.err
    assert {report["patches"][0]["state"] for report in engine.reports()} == {"applied"}


# What is shown of it


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_the_interpreters_own_traceback_shows_the_changed_lines(engine: Sandbox, version: str) -> None:
    diff_patch(engine, {"fakeengine/scheduler.py": ("        return [number]", "        # new\n        1 / 0")})
    engine.generate()
    done = engine.python(USE, python=str(interpreters.find(version)))
    assert 'scheduler.changed.py", line 4, in step\n    1 / 0' in done.err
    assert "ZeroDivisionError" in done.others[-1]
    assert "_vllm_livepatch" not in done.err


def test_the_traceback_of_a_module_that_raises_has_no_frame_of_ours(engine: Sandbox) -> None:
    engine.write({"fakeengine/third.py": "import fakeengine.scheduler\nboom()\n"})
    diff_patch(engine, {**STEP, "fakeengine/third.py": ("boom()", "bang()")})
    engine.generate()
    done = engine.python("import fakeengine.third")
    assert done.code == 1
    assert "_vllm_livepatch" not in done.err.replace("vllm-livepatch", "")
    assert 'third.py", line 2, in <module>\n    boom()' in done.err, "as it came, it raises too: that is what is shown"


def test_inspect_and_linecache(engine: Sandbox) -> None:
    diff_patch(
        engine, {"fakeengine/scheduler.py": ("class Scheduler:", "LONGER = 'é\\x0c'\n\n\nclass Scheduler:\n    # new")}
    )
    engine.generate()
    after = changed_text(
        engine, "fakeengine/scheduler.py", ("class Scheduler:", "LONGER = 'é\\x0c'\n\n\nclass Scheduler:\n    # new")
    )
    (engine.root / "after.py").write_text(after, "utf-8")
    code = f"""
        import inspect, linecache, traceback
        import fakeengine.scheduler as m
        after = open({str(engine.root / "after.py")!r}, encoding="utf-8").read()
        assert inspect.getsource(m) == after
        assert inspect.getsource(m.Scheduler) == after[after.index("class") : after.index("\\n\\n\\ndef")] + "\\n"
        assert inspect.getsource(m.Scheduler.step).split() == "def step(self, number): return [number]".split()
        assert inspect.getsourcelines(m.Scheduler.free)[1] == after.split("\\n").index("    def free(self):") + 1
        assert inspect.getsource(m.module_function) == after[after.index("def module") :]
        assert inspect.getmodule(m.Scheduler.step) is m
        assert m.__loader__.get_source(m.__name__) == after
        for file in (m.__file__, m.Scheduler.step.__code__.co_filename):
            assert [linecache.getline(file, n + 1) for n in range(after.count("\\n"))] == after.splitlines(True)
            linecache.checkcache(file)
            assert linecache.getline(file, 5) == "    # new\\n"
        print(m.__file__, m.__spec__.origin, m.Scheduler.step.__code__.co_filename)
        """
    done = engine.python(code)
    assert (done.code, done.err.count("Traceback")) == (0, 0), done.err
    file, origin, shown = done.out.split()
    assert file == origin == str(engine.site / "fakeengine" / "scheduler.py")
    assert Path(shown).read_text("utf-8") == after


def test_pdb(changed: Sandbox) -> None:
    code = "import pdb; from fakeengine.scheduler import Scheduler; pdb.runcall(Scheduler().step, 7)"
    command = [sys.executable, "-c", code]
    done = finish(command, changed.environ(), stdin=None, input=b"list\nbreak fakeengine.scheduler:6\ncontinue\n")
    assert '  3  ->\t        return ["changed", number]' in done.out
    assert "scheduler.changed.py(3)step()" in done.out


def test_coverage(changed: Sandbox) -> None:
    code = f"""
        import coverage, os
        measured = coverage.Coverage(source=["fakeengine"], data_file=None)
        measured.start()
        {USE}
        measured.stop()
        (file,) = [name for name in measured.get_data().measured_files() if name.endswith("changed.py")]
        _, statements, missing, _ = measured.analysis(file)
        lines = open(file).read().splitlines()
        print([lines[number - 1].strip() for number in statements if number not in missing])
        """
    done = changed.python(code, python=sys.executable)
    executed = ["class Scheduler:", "def step(self, number):", 'return ["changed", number]', "def free(self):"]
    assert done.out == CHANGED + f"{[*executed, 'def module_function():']}\n", done.err


# Several modules, several patches


def test_modules_and_packages_that_the_diff_adds(engine: Sandbox) -> None:
    added = {
        "fakeengine/extra/__init__.py": "",
        "fakeengine/extra/deep.py": "def deep():\n    return 'deep'\n",
        "fakeengine/flat.py": "from fakeengine.extra import deep\n\nNAME = __name__\n",
    }
    diff_patch(engine, {"fakeengine/third.py": ("'stock'", "'changed'")}, added=added)
    engine.generate()
    code = """
        import importlib, inspect, fakeengine.third
        import fakeengine.flat as flat
        from fakeengine.extra.deep import deep
        print(flat.NAME, deep(), inspect.getsource(deep).split(), inspect.getsource(flat).count("\\n"))
        print(list(fakeengine.extra.__path__), importlib.reload(flat) is flat, flat.__spec__.parent)
        """
    done = engine.python(code)
    assert done.out.splitlines() == [
        "fakeengine.flat deep ['def', 'deep():', 'return', \"'deep'\"] 3",
        "[] True fakeengine",
    ], done.err
    assert state(engine) == ("applied", None)
    assert len(engine.reported("diffed")["targets"]) == 4
    assert engine.python("import fakeengine.flat", LIVEPATCH="off").code == 1


def test_an_added_module_can_be_the_first_that_is_imported(engine: Sandbox) -> None:
    diff_patch(engine, STEP, added={"fakeengine/flat.py": f"{USE}\n"})
    engine.generate()
    assert engine.python("import fakeengine.flat").out == CHANGED


def test_it_is_partly_applied_until_all_is_imported(engine: Sandbox) -> None:
    diff_patch(engine, {**STEP, "fakeengine/third.py": ("'stock'", "'changed'")})
    engine.generate()
    assert engine.python(USE).out == CHANGED
    assert state(engine) == ("applied", "partly")
    assert engine.reported("diffed")["detail"] == "1 of 2 modules imported so far"


def both(sandbox: Sandbox) -> Done:
    return sandbox.python(f"{USE}\nfrom fakeengine import third; print(third.VALUE)")


@pytest.mark.parametrize("spoiled", ["fakeengine/third.py", "fakeengine/scheduler.py"])
def test_if_one_module_does_not_match_none_is_changed(engine: Sandbox, spoiled: str) -> None:
    diff_patch(engine, {**STEP, "fakeengine/third.py": ("'stock'", "'changed'")})
    engine.generate()
    engine.write({spoiled: text_of(engine, spoiled) + "\n\nMORE = 1\n"})
    done = both(engine)
    assert done.out == STOCK + "stock\n"
    assert state(engine) == ("skipped", "drifted")
    assert module_of(spoiled) in engine.reported("diffed")["detail"]
    assert len([line for line in done.lines if "is not applied" in line]) == 1


def test_force_still_wants_a_place_for_every_hunk(engine: Sandbox) -> None:
    diff_patch(engine, {**STEP, "fakeengine/third.py": ("'stock'", "'changed'")})
    engine.generate()
    engine.write({"fakeengine/third.py": "MORE = 1\n" + text_of(engine, "fakeengine/third.py")})
    assert engine.python(USE, LIVEPATCH_DIFFED="force").out == CHANGED
    engine.write({"fakeengine/third.py": "VALUE = 'other'\n"})
    done = engine.python(f"{USE}\nfrom fakeengine import third; print(third.VALUE)", LIVEPATCH_DIFFED="force")
    assert done.out == STOCK + "other\n"
    assert "fakeengine.third: hunk 1 (line 1) finds its lines nowhere" in done.err


def test_both_kinds_on_one_module(engine: Sandbox) -> None:
    diff_patch(engine, STEP, name="zz-diffed")  # by its name it would come last
    engine.patch("around", [f"{SCHEDULER}:Scheduler.step"], variant=[wrapped_variant(engine, STEP)])
    engine.generate()
    assert engine.python(USE).out == "['patched', 'changed', 7]\n"
    assert state(engine, "zz-diffed") == state(engine, "around") == ("applied", None)


def test_a_wrapper_is_decided_on_what_the_diff_makes(engine: Sandbox) -> None:
    engine.patch("around", [f"{SCHEDULER}:Scheduler.step"])  # knows the stock function only
    diff_patch(engine, STEP)
    engine.generate()
    assert engine.python(USE).out == CHANGED
    assert state(engine) == ("applied", None)
    assert state(engine, "around") == ("skipped", "drifted")
    name = f"{SCHEDULER}:Scheduler.step"
    why = f"fakeengine 1.0 has the fault, and the diff diffed changes {name}, code of which this patch knows only"
    assert engine.reported("around")["detail"].startswith(why)


def test_what_a_diff_keeps_from_being_applied_is_said_of_it(engine: Sandbox, cli: Cli) -> None:
    """In the process's one line, in its own, and by `check`, which shows no empty difference of the release."""
    engine.patch("around", [f"{SCHEDULER}:Scheduler.step"])
    diff_patch(engine, STEP)
    engine.generate()
    done = engine.python(USE)
    assert "applied=diffed armed=0 skipped=0 failed=around " in done.greeting
    (line,) = done.others
    assert line.startswith(
        "vllm-livepatch: around is not applied (drifted): fakeengine 1.0 has the fault, and the diff "
    )
    place = ["--site-packages", str(engine.site), "--patch-dir", str(engine.patches), "--only"]
    done = cli("check", *place)
    assert done.code == 1
    assert f"around: {line.partition(': ')[2].partition(': ')[2]}" in done.out.replace("\n", " ")
    assert "its code cannot be shown" not in done.out


def test_wrappers_stand_around_what_a_diff_leaves_as_it_was(engine: Sandbox) -> None:
    """Lines move, and the rest of the class changes: the wrapped method is the one that is known."""
    engine.patch("around", [f"{SCHEDULER}:Scheduler.step"])
    above = ("class Scheduler:", "MORE = 1\n\n\nclass Scheduler:\n    limit = 3\n")
    diff_patch(engine, {"fakeengine/scheduler.py": above}, name="higher-up")
    diff_patch(engine, FURTHER_DOWN)
    engine.generate()
    done = engine.python(USE_BOTH)
    assert (done.out, done.others) == ("['patched', 7]\nchanged too\n", [])
    assert state(engine, "around") == state(engine) == state(engine, "higher-up") == ("applied", None)
    (found,) = check.check([engine.entries()["around"].patch], check.directory_tree(engine.site, ["fakeengine"]))[1]
    assert found.decision.apply


def test_a_diff_of_a_second_package_is_named_by_who_relies_on_it(engine: Sandbox, cli: Cli) -> None:
    """Decided on first, also in a process that does not import that package."""
    called = "otherengine.io:send"
    engine.write({"otherengine/__init__.py": "", "otherengine/io.py": "def send(item):\n    return [item]\n"})
    companion = {"package": "otherengine", "releases": ["1.0"], "code": engine.fingerprints(called)}
    step = f"{SCHEDULER}:Scheduler.step"
    own = {"releases": ["1.0"], "code": engine.fingerprints(step)}
    engine.patch("around", [step], calls=[called], variant=[own], companion=[companion])
    change = {"otherengine/io.py": ("[item]", "[item, item]")}
    diff_patch(engine, change, package="otherengine")
    engine.generate()
    done = engine.python(USE)
    said = f"has code that was never verified: {called}, and the diff diffed changes {called}"
    assert (done.out, state(engine, "around")) == (STOCK, ("skipped", "drifted"))
    assert engine.reported("around")["detail"].endswith(said)
    asked = cli("check", "--site-packages", str(engine.site), "--patch-dir", str(engine.patches), "--only", "--json")
    assert next(one["detail"] for one in json.loads(asked.out)["patches"]).endswith(said)


def test_a_diff_of_code_that_had_drifted_before_is_named(engine: Sandbox) -> None:
    free = f"{SCHEDULER}:Scheduler.free"
    step = f"{SCHEDULER}:Scheduler.step"
    variant = {"releases": ["1.0"], "code": {**engine.fingerprints(step), free: "0" * 16}}
    engine.patch("around", [step], calls=[free], variant=[variant])
    diff_patch(engine, STEP)
    engine.generate()
    engine.python(USE)
    assert engine.reported("around")["detail"] == (
        f"fakeengine 1.0 has code that was never verified: {step}, {free}, and the diff diffed changes {step}"
    )


@pytest.mark.parametrize(
    ("toggle", "code", "reason"), [("auto", 0, "fixed-upstream"), ("on", 78, "drifted"), ("off", 0, "off")]
)
def test_a_diff_makes_no_patch_wanted_that_the_release_does_not_need(
    engine: Sandbox, toggle: str, code: int, reason: str
) -> None:
    step = f"{SCHEDULER}:Scheduler.step"
    fixed = {"releases": ["1.0"], "verdict": "fixed-upstream", "code": engine.fingerprints(step)}
    engine.patch("around", [step], variant=[fixed])
    diff_patch(engine, STEP)
    engine.generate()
    assert engine.python(USE, LIVEPATCH="strict", LIVEPATCH_AROUND=toggle).code == code
    if not code:
        assert state(engine, "around") == ("skipped", reason)
    asked = finish(
        [PYTHON, engine.bundle, "check", "--json"], engine.environ(path=[engine.site], LIVEPATCH_AROUND=toggle)
    )
    (offline,) = (patch for patch in json.loads(asked.out)["patches"] if patch["name"] == "around")
    assert offline["reason"] == reason
    if toggle == "auto":
        assert offline["detail"] == f"fakeengine 1.0 no longer has the fault; a diff changes {step}"


def wrapped_variant(sandbox: Sandbox, change: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """The variant of a wrapper around `step` as a diff makes it."""
    ((file, replaced),) = change.items()
    stock = text_of(sandbox, file)
    sandbox.write({file: changed_text(sandbox, file, replaced)})
    found = sandbox.fingerprints(f"{SCHEDULER}:Scheduler.step")
    sandbox.write({file: stock})
    return {"releases": ["1.0"], "code": found}


def test_two_diffs_on_one_module(engine: Sandbox) -> None:
    diff_patch(engine, STEP, name="first")
    diff_patch(engine, FURTHER_DOWN, name="second")
    engine.generate()
    done = engine.python(USE_BOTH)
    assert done.out == CHANGED + "changed too\n"
    assert state(engine, "first") == state(engine, "second") == ("applied", None)


def test_of_two_diffs_that_conflict_the_first_by_name_stands(engine: Sandbox) -> None:
    diff_patch(engine, STEP, name="first")
    diff_patch(engine, {"fakeengine/scheduler.py": ("[number]", "[number + 1]")}, name="second")
    engine.generate()
    done = engine.python(USE)
    assert done.out == CHANGED
    assert state(engine, "first") == ("applied", None)
    assert state(engine, "second") == ("skipped", "drifted")
    assert "fakeengine.scheduler: hunk 1 (line 1) finds its lines nowhere" in done.err
    assert engine.python(USE, LIVEPATCH_FIRST="off").out == "[8]\n"


def test_a_diff_and_its_facts_must_agree(engine: Sandbox) -> None:
    diff_patch(engine, STEP, targets=["fakeengine.third"], variant=[])
    with pytest.raises(UserError, match=r"changes other modules than patch\.toml says"):
        engine.generate()


# When it fails


def test_a_module_that_raises_as_changed_works_as_it_came(engine: Sandbox) -> None:
    diff_patch(engine, {"fakeengine/scheduler.py": ("class Scheduler:", f"NEW = 1\n{RAISES}\nclass Scheduler:")})
    engine.generate()
    done = engine.python(
        f"{USE}\nimport inspect, {SCHEDULER} as m; print(hasattr(m, 'NEW'), 'raise' in inspect.getsource(m))"
    )
    assert (done.code, done.out) == (0, STOCK + "False False\n")
    assert state(engine) == ("failed", "raised")
    assert done.lines[1].endswith("(raised): fakeengine.scheduler as changed: RuntimeError: as changed")
    assert len(done.lines) == 2


def test_under_strict_it_ends_the_process(engine: Sandbox) -> None:
    diff_patch(engine, {"fakeengine/scheduler.py": ("class Scheduler:", f"{RAISES}\nclass Scheduler:")})
    engine.generate()
    done = engine.python(USE, LIVEPATCH="strict")
    assert (done.code, done.out) == (78, "")
    assert "LIVEPATCH=strict: diffed is not applied (raised)" in done.lines[-1]


TOGETHER: dict[str, tuple[dict[str, tuple[str, str]], str]] = {
    "the inner one raises": (
        {
            "fakeengine/worker.py": ("Scheduler().step(item)", "['changed worker']"),
            "fakeengine/scheduler.py": ("class Scheduler:", f"{RAISES}\nclass Scheduler:"),
        },
        "fakeengine.scheduler as changed: RuntimeError",
    ),
    "the outer one raises when the inner one is there": (
        {**STEP, "fakeengine/worker.py": ("def work(item):", f"{RAISES}\ndef work(item):")},
        "fakeengine.worker as changed: RuntimeError",
    ),
    "the outer one catches it": (
        {
            "fakeengine/worker.py": (
                "from fakeengine.scheduler import Scheduler\n",
                "try:\n    from fakeengine.scheduler import Scheduler\nexcept RuntimeError:\n    Scheduler = None\n",
            ),
            "fakeengine/scheduler.py": ("class Scheduler:", f"{RAISES}\nclass Scheduler:"),
        },
        "fakeengine.scheduler as changed: RuntimeError",
    ),
    "it imports what is not there": (
        {**STEP, "fakeengine/worker.py": ("import Scheduler\n", "import Scheduler, gone\n")},
        "fakeengine.worker as changed: ImportError: cannot import name 'gone'",
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_modules_that_are_changed_together_fall_back_together(engine: Sandbox, case: str) -> None:
    changes, message = TOGETHER[case]
    diff_patch(engine, changes)
    engine.generate()
    done = engine.python(f"from fakeengine.worker import work; print(work(7))\n{USE}")
    assert (done.code, done.out) == (0, "[7]\n" + STOCK), done.err
    assert state(engine) == ("failed", "raised")
    assert message in engine.reported("diffed")["detail"]
    assert len(done.lines) == 2


def test_what_was_loaded_long_before_stays_and_is_reported(engine: Sandbox) -> None:
    diff_patch(engine, {**STEP, "fakeengine/third.py": ("VALUE", f"{RAISES}\nVALUE")})
    engine.generate()
    done = both(engine)
    assert done.out == CHANGED + "stock\n"
    assert state(engine) == ("failed", "raised")
    assert engine.reported("diffed")["detail"].endswith("loaded earlier, and so still as changed: fakeengine.scheduler")


def test_another_patchs_failure_is_not_ours(engine: Sandbox) -> None:
    """The outer module's patch stays when a module that it imports, of another patch, falls back."""
    diff_patch(engine, {"fakeengine/worker.py": ("step(item)", "step('outer')")}, name="outer")
    diff_patch(engine, {"fakeengine/scheduler.py": ("class Scheduler:", f"{RAISES}\nclass Scheduler:")}, name="inner")
    engine.generate()
    done = engine.python("from fakeengine.worker import work; print(work(7))")
    assert (done.code, done.out) == (0, "['outer']\n")
    assert state(engine, "outer") == ("applied", None)
    assert state(engine, "inner") == ("failed", "raised")


def test_patches_that_share_a_module_fall_back_together(engine: Sandbox) -> None:
    diff_patch(engine, {"fakeengine/third.py": ("VALUE", f"{RAISES}\nVALUE"), **STEP}, name="first")
    diff_patch(engine, FURTHER_DOWN, name="second")
    engine.generate()
    done = engine.python(f"from fakeengine import third\n{USE_BOTH}")
    assert (done.code, done.out) == (0, STOCK + "stock\n")
    assert state(engine, "first") == state(engine, "second") == ("failed", "raised")


def test_wrappers_are_decided_on_anew_when_the_diff_is_dropped(engine: Sandbox) -> None:
    engine.patch("around", [f"{SCHEDULER}:Scheduler.step"])
    change = {"fakeengine/scheduler.py": ("return [number]", f"return [number, 0]\n\n    {RAISES}")}
    diff_patch(engine, change)
    engine.generate()
    assert engine.python(USE).out == "['patched', 7]\n"
    assert state(engine) == ("failed", "raised")
    assert state(engine, "around") == ("applied", None)


EITHER_WAY = """
import importlib, sys
try:
    import fakeengine.third
except NameError as error:
    print(error)
print("fakeengine.scheduler" in sys.modules)
import builtins
builtins.boom = builtins.bang = print
import fakeengine.third
from fakeengine.scheduler import Scheduler
print(fakeengine.third.VALUE, Scheduler().step(7))
"""


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_what_raises_either_way_is_not_the_diffs_fault(engine: Sandbox, mode: str) -> None:
    """As a module that imports what is not installed. When it can be imported, it is as changed."""
    engine.write({"fakeengine/third.py": "import fakeengine.scheduler\nVALUE = 'stock'\nboom()\n"})
    diff_patch(engine, {"fakeengine/third.py": ("'stock'\nboom()", "'changed'\nbang()"), **STEP})
    engine.patch("around", [f"{SCHEDULER}:Scheduler.step"], variant=[wrapped_variant(engine, STEP)])
    engine.generate()
    done = engine.python(EITHER_WAY, LIVEPATCH=mode)
    assert done.out == "name 'boom' is not defined\nFalse\n\nchanged ['patched', 'changed', 7]\n", done.err
    assert (done.code, done.others) == (0, [])
    assert state(engine) == state(engine, "around") == ("applied", None)


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_a_module_that_never_can_be_imported_says_nothing_of_the_diff(engine: Sandbox, mode: str) -> None:
    engine.write({"fakeengine/third.py": "VALUE = 1\nboom()\n"})
    diff_patch(engine, {"fakeengine/third.py": ("boom()", "bang()")})
    engine.generate()
    done = engine.python("import fakeengine.third", LIVEPATCH=mode)
    assert done.code == 1
    assert "NameError: name 'boom' is not defined" in "\n".join(done.others)
    assert not [line for line in done.others if "vllm-livepatch" in line]
    assert state(engine) == ("armed", None)


def test_a_module_that_was_imported_before_the_bundle(changed: Sandbox) -> None:
    """A .pth file that is read before the bundle's entry runs imports a module that the diff would change."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    place = changed.home / ".local" / "lib" / version / "site-packages"
    changed.write({"early.pth": f"import sys; sys.path.insert(0, {str(changed.site)!r}); import {SCHEDULER}\n"}, place)
    diff_patch(
        changed,
        {"fakeengine/third.py": ("'stock'", "'changed'"), "fakeengine/worker.py": ("step(item)", "step(0)")},
        name="late",
    )
    changed.generate()
    done = both(changed)
    assert done.out == STOCK + "changed\n"
    assert state(changed) == ("skipped", "imported")
    assert "fakeengine.scheduler had been imported before the bundle was in place" in done.err
    assert state(changed, "late") == ("applied", "partly")


# The cache


def test_a_text_is_compiled_once(changed: Sandbox) -> None:
    assert changed.python(USE).out == CHANGED
    (code,), (source,) = cached(changed, ".code"), cached(changed, ".changed.py")
    before = code.stat().st_mtime_ns, source.stat().st_mtime_ns
    assert changed.python(USE).out == CHANGED
    assert (code.stat().st_mtime_ns, source.stat().st_mtime_ns) == before
    assert (changed.home / ".cache" / "vllm-livepatch").stat().st_mode & 0o777 == 0o700


def test_another_text_is_another_entry(changed: Sandbox) -> None:
    assert changed.python(USE).out == CHANGED
    diff_patch(changed, FURTHER_DOWN, name="second")
    changed.generate()
    assert changed.python(USE_BOTH).out == CHANGED + "changed too\n"
    assert len({file.parents[1].name for file in cached(changed, ".code")}) == 2


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[:-10],
    "one byte": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    "of another Python": lambda data: b"\0\0\0\0" + data[4:],
}


@pytest.mark.parametrize("ending", [".code", ".changed.py"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_again(changed: Sandbox, damage: str, ending: str) -> None:
    assert changed.python(USE).out == CHANGED
    (file,) = cached(changed, ending)
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[damage](whole))
    assert changed.python(USE).out == CHANGED
    assert file.read_bytes() == whole


def test_optimised_bytecode_is_kept_apart(engine: Sandbox) -> None:
    diff_patch(engine, {"fakeengine/third.py": ("'stock'", "__debug__")})
    engine.generate()
    code = "from fakeengine import third; print(third.VALUE)"
    assert [engine.python(code, *flags).out for flags in ((), ("-O",), ())] == ["True\n", "False\n", "True\n"]


NO_PLACE = "import tempfile; tempfile.tempdir = '/proc/nowhere'\n"
RAISING = {"fakeengine/scheduler.py": ("        return [number]", "        # new\n        1 / 0")}


@pytest.mark.parametrize(
    ("code", "environ"),
    [
        ("", {"XDG_CACHE_HOME": "/proc/nowhere"}),
        ("", {"HOME": "/proc/nowhere"}),
        ("", {"XDG_CACHE_HOME": "not/absolute", "HOME": "/proc/nowhere"}),
        (NO_PLACE, {"XDG_CACHE_HOME": "/proc/nowhere"}),
        (NO_PLACE, {"HOME": "/proc/nowhere"}),
    ],
)
def test_without_a_cache_all_is_the_same_but_slower(engine: Sandbox, code: str, environ: dict[str, str]) -> None:
    diff_patch(engine, RAISING)
    engine.generate()
    done = engine.python(f"{code}{USE}", TMPDIR=str(engine.root), **environ)
    assert "line 4, in step\n    1 / 0" in done.err, "the interpreter's own printer finds the lines"
    assert state(engine) == ("applied", None)
    places = [file for file in engine.root.rglob("*.changed.py") if file.is_file()]
    assert [place.is_relative_to(engine.root / f"vllm-livepatch-{os.getuid()}-cache") for place in places] == [True] * (
        not code
    )


def test_a_cache_that_takes_no_file(engine: Sandbox) -> None:
    """As a full disk is: the directory is there, and nothing goes into it."""
    (engine.home / ".cache" / "vllm-livepatch").mkdir(parents=True)
    (engine.home / ".cache" / "vllm-livepatch" / "changed").write_text("")
    diff_patch(engine, RAISING)
    engine.generate()
    done = engine.python(USE)
    assert "line 4, in step\n    1 / 0" in done.err
    assert state(engine) == ("applied", None)


def test_a_cache_that_is_somebody_elses_is_not_used(changed: Sandbox) -> None:
    place = changed.home / ".cache" / "vllm-livepatch"
    place.mkdir(parents=True)
    if os.getuid() == 0:
        os.chown(place, 12345, 12345)
    else:
        place.chmod(0o500)
    assert changed.python(USE, TMPDIR=str(changed.root)).out == CHANGED
    assert cached(changed, ".code") == []
    assert list((changed.root / f"vllm-livepatch-{os.getuid()}-cache").rglob("*.code"))


FORGED = "print('forged')"


def forge(code: Path) -> None:
    """Put another program in the place of the compiled module, with the digest that it needs."""
    data = marshal.dumps(
        compile(FORGED, str(code).removesuffix(code.name[code.name.index(".changed.py") + 11 :]), "exec")
    )
    code.write_bytes(importlib.util.MAGIC_NUMBER + hashlib.sha256(data).digest() + data)


@pytest.mark.parametrize(
    "what", ["the file", "its directory", "the cache", "above the cache", "a link", "a second name"]
)
def test_what_others_may_write_is_not_executed(changed: Sandbox, what: str) -> None:
    """Neither as root. Where nothing is wrong, the forged code does run: that is what the others are to be seen by."""
    assert changed.python(USE, TMPDIR=str(changed.root)).out == CHANGED
    (code,) = cached(changed, ".code")
    forge(code)
    assert changed.python("import fakeengine.scheduler", TMPDIR=str(changed.root)).out == "forged\n"
    cache = changed.home / ".cache" / "vllm-livepatch"
    if what == "a link":
        code.rename(code.with_suffix(".real"))
        code.symlink_to(code.with_suffix(".real"))
    elif what == "a second name":
        os.link(code, code.with_suffix(".second"))
    else:
        place = {"the file": code, "its directory": code.parent, "the cache": cache, "above the cache": cache.parent}[
            what
        ]
        place.chmod(place.stat().st_mode | 0o020)
    assert changed.python(USE, TMPDIR=str(changed.root)).out == CHANGED


def test_a_link_in_the_temporary_directory_is_not_followed(changed: Sandbox) -> None:
    (changed.root / "elsewhere").mkdir()
    (changed.root / f"vllm-livepatch-{os.getuid()}-cache").symlink_to(changed.root / "elsewhere")
    done = changed.python(USE, TMPDIR=str(changed.root), HOME="/proc/nowhere")
    assert done.out == CHANGED
    assert list((changed.root / "elsewhere").iterdir()) == []


def test_fingerprints_are_remembered_by_content(changed: Sandbox) -> None:
    code = f"{USE}\nimport sys; print('ast' in sys.modules)"
    assert changed.python(code).out == CHANGED + "True\n"
    (file,) = (changed.home / ".cache" / "vllm-livepatch" / "fingerprints").iterdir()
    before = file.stat().st_mtime_ns
    assert changed.python(code).out.startswith(CHANGED)
    assert file.stat().st_mtime_ns == before
    file.write_text("[]")
    assert changed.python(USE).out == CHANGED
    changed.write({"fakeengine/scheduler.py": text_of(changed, "fakeengine/scheduler.py") + "\n\nMORE = 1\n"})
    assert changed.python(USE).out == STOCK


# Before start


def test_check_decides_as_the_process_does(engine: Sandbox) -> None:
    """Diffs first, each on what those before it made, and wrappers on what all of them make."""
    diff_patch(engine, STEP, name="zz-first")
    diff_patch(engine, {"fakeengine/scheduler.py": ("[number]", "[number + 1]")}, name="zz-second")
    diff_patch(engine, {"fakeengine/third.py": ("'stock'", "'changed'")}, name="drifted")
    engine.patch("of-changed", [f"{SCHEDULER}:Scheduler.step"], variant=[wrapped_variant(engine, STEP)])
    engine.patch("of-stock", [f"{SCHEDULER}:Scheduler.step"])
    engine.patch("beside", [f"{SCHEDULER}:Scheduler.free"], auto="traced")
    engine.write({"fakeengine/third.py": "VALUE = 'other'\n"})
    engine.generate()
    assert engine.python(f"{USE}\nfrom fakeengine import third").out == "['patched', 'changed', 7]\n"
    entries = engine.entries()
    _, answers = check.check(
        [entry.patch for entry in entries.values()],
        check.directory_tree(engine.site, ()),
        {name: entry.changes() for name, entry in entries.items()},
    )
    offline = {answer.patch.name: (answer.decision.verdict, answer.decision.apply) for answer in answers}
    reported = {patch["name"]: (patch["verdict"], patch["state"] == "applied") for patch in engine.report()["patches"]}
    assert offline == reported
    assert {name for name, (_, applied) in offline.items() if applied} == {"zz-first", "of-changed", "beside"}


def test_what_keeps_artifacts_apart_rides_with_every_diff(engine: Sandbox) -> None:
    diff_patch(engine, STEP)
    entries = catalogue.load([engine.patches])
    assert set(catalogue.choose(entries, ["diffed"])) == {"diffed", "compile-cache-key"}
    assert set(catalogue.choose(entries, ["stale-finished-recving"])) == {"stale-finished-recving"}


def test_without_a_change_of_traced_code_it_is_not_applied(engine: Sandbox) -> None:
    engine.patch("beside", [f"{SCHEDULER}:Scheduler.step"], auto="traced")
    diff_patch(engine, {"fakeengine/third.py": ("'stock'", "'changed'")}, traced=False)
    engine.generate()
    assert engine.python(USE).out == STOCK
    assert state(engine, "beside") == ("skipped", "optional")
    assert engine.python(USE, LIVEPATCH_BESIDE="on").out == "['patched', 7]\n"


PATCH_SET = """\
    def wrappers(livepatch):
        return dict.fromkeys(TARGETS, lambda wrapped, instance, args, kwargs: livepatch.patch_set())
    """


def test_the_patch_set_is_the_same_in_every_process(engine: Sandbox) -> None:
    """Also where the changed modules are imported later, or not at all; and another one for another set."""
    engine.patch("asks", [f"{SCHEDULER}:Scheduler.free"], PATCH_SET)
    diff_patch(engine, {"fakeengine/third.py": ("'stock'", "'changed'")}, name="one")
    diff_patch(engine, {"fakeengine/worker.py": ("step(item)", "step(0)")}, name="two", traced=False)
    option = {"name": "LIMIT", "default": 1}
    traced: dict[str, Any] = {"option": [option], "traced": True, "package": "elsewhere"}
    engine.patch("three", ["elsewhere.there:f"], **traced, variant=[])
    engine.write({"elsewhere/__init__.py": "", "elsewhere/there.py": "def f(): pass\n"})
    engine.patch("three", ["elsewhere.there:f"], **traced)
    engine.generate()
    ask = f"from {SCHEDULER} import Scheduler; print(Scheduler().free())"

    def asked(code: str = ask, **environ: str) -> str:
        done = engine.python(code, **environ)
        assert done.code == 0, done.err
        return done.out.strip()

    whole = asked()
    assert len(whole) == 64
    assert asked(f"import fakeengine.third, elsewhere.there, fakeengine.worker\n{ask}") == whole
    others = [asked(LIVEPATCH_ONE="off"), asked(LIVEPATCH_THREE="off"), asked(LIVEPATCH_THREE_LIMIT="2")]
    assert len({whole, *others}) == 4
    assert asked(LIVEPATCH_TWO="off") == whole
    assert asked(LIVEPATCH_ONE="off", LIVEPATCH_THREE="off") == ""
    shutil.rmtree(engine.root / "patches/one")
    diff_patch(engine, {"fakeengine/third.py": ("'stock'", "'otherwise'")}, name="one")
    engine.generate()
    assert asked() not in {whole, *others}, "the same name and options, and another change"


def test_a_system_that_has_no_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code names a file all the same: one that is not there."""
    monkeypatch.delattr(os, "memfd_create")
    made = changed_module.ChangedModule("engine.part", "value = 1\n", None, None)
    assert made.filename.startswith("vllm-livepatch/changed/")
    assert made.filename.endswith("/engine/part.changed.py")
    assert made.code().co_filename == made.filename
