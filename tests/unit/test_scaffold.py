"""`new` and `ready`: a patch's folder from nothing to what can be shipped."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.sitecustomize.settings import GROUPS
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.commands import rendering, scaffold
from vllm_livepatch.tools.upkeep import versions

from tests.unit.support import PYTHON, STEP, USE_STEP, Cli, Sandbox

MODULE = "fakeengine.scheduler"


@pytest.fixture
def out(sandbox: Sandbox) -> Path:
    source = """
import functools
def custom_op(name): return functools.lru_cache  # as torch's, which makes another callable of it
class Scheduler:
    def step(self, number, *, also=None):
        return [number]
    async def later(self, number, again=False): ...
    async def steps(self, number):
        for one in range(number):
            yield one
    async def given(self):
        def inner(): yield 1
        return inner
    @functools.lru_cache
    def kept(self, number): return number
    @custom_op("fakeengine::double")
    def double(self, number): return number * 2
    @staticmethod
    def made(config): ...
    @functools.cached_property
    def size(self): return 3
    limit = 3
def begin(config): ...
"""
    sandbox.write({"fakeengine/scheduler.py": source})
    return sandbox.patches


def made(cli: Cli, sandbox: Sandbox, *targets: str, name: str = "my-fix") -> int:
    named = [word for target in targets for word in ("--target", target)]
    return cli("new", name, *named, "--out", str(sandbox.patches), "--site-packages", str(sandbox.site)).code


@pytest.mark.parametrize("folder", versions.folders(), ids=versions.name_of)
def test_those_that_come_with_this_project_say_all_that_the_pages_have_of_them(folder: Path) -> None:
    patch = catalogue.read(folder).patch
    assert [*scaffold.untold(folder, patch), *scaffold._out_of_date(patch)] == []


def test_what_a_patch_of_this_project_does_not_say_is_named() -> None:
    patch = catalogue.load()["failed-loads"].patch
    seen = [{"under": "nowhere", "what": "x"}, {"under": "ends", "what": ""}]
    about = {**patch.about, "without": "", "keeps": {}, "seen": seen, "own_error": {"changed": "x"}}
    del about["gone"]
    assert list(scaffold.unsaid(dataclasses.replace(patch, group="", about=about))) == [
        f"patch.toml: group is none of {', '.join(GROUPS)}",
        "patch.toml does not say: about.without",
        "patch.toml does not say: about.seen, what",
        "patch.toml does not say: about.own_error, done",
        "patch.toml does not say: about.gone",
        f"patch.toml: under in [[about.seen]] is none of {', '.join(rendering.SEEN)}",
    ]


@pytest.mark.parametrize("length", [26, 27])
def test_what_is_blank_or_too_long_is_named(tmp_path: Path, length: int) -> None:
    told = {"fault": "x" * length, **dict.fromkeys(("symptom", "why", "change", "origin"), "x"), "threads": []}
    facts = {"title": " ", "package": "engine", "targets": ["engine.a:f"], "about": told}
    first, *more = scaffold.untold(tmp_path / "one", to_patch("one", facts))
    assert first == "patch.toml does not say: title"
    assert [line.partition(", ")[0] for line in more] == ["patch.toml: fault has more than 26 characters"] * (
        length - 26
    )


def test_a_new_folder_names_all_that_is_asked_of_one_of_this_project(sandbox: Sandbox, out: Path, cli: Cli) -> None:
    assert made(cli, sandbox, STEP) == 0
    patch = catalogue.read(out / "my_fix").patch
    assert {*patch.about} == {*scaffold._TOLD, *scaffold._OURS}
    lines = (out / "my_fix/patch.toml").read_text("utf-8").splitlines()
    empty = [line for line in lines if re.search(r'= ""|= \[\]|^# group|^\[about\.(keeps|counters)\]', line)]
    assert len(empty) == 13
    assert all(re.search(r"  # \w", line) for line in empty), empty
    unsaid = [line.rpartition(": ")[2] for line in scaffold.unsaid(patch)]
    assert unsaid[0].startswith("group is none of")
    assert unsaid[-1].startswith("under in [[about.seen]] is none of")
    assert len(unsaid) == len(empty) - len({"threads", "keeps", "counters"}) + 1  # an empty table may be all there is


def test_from_nothing_to_applied(sandbox: Sandbox, out: Path, cli: Cli) -> None:
    targets = [STEP, f"{MODULE}:Scheduler.later", f"{MODULE}:Scheduler.made", f"{MODULE}:begin"]
    assert made(cli, sandbox, *targets) == 0
    folder = out / "my_fix"
    text = (folder / "wrappers.py").read_text("utf-8")
    assert "def step(original: Any, instance: Any, number: Any, *rest: Any, **named: Any) -> Any:" in text
    assert "async def later(original: Any, instance: Any, number: Any, *rest" in text
    assert "return await original(number, *rest, **named)" in text
    assert "def made(original: Any, config: Any, *rest" in text
    assert "def begin(original: Any, config: Any, *rest" in text
    done = cli("ready", str(folder))
    assert done.code == 1
    lacks = [line.partition(": ")[2] for line in done.out.splitlines()]
    assert [line for line in lacks if line.startswith("patch.toml does not say")] == [
        f"patch.toml does not say: {key}" for key in ("title", "fault", "symptom", "why", "change", "origin")
    ]
    assert any(line.startswith("there is no patch.lock: ") for line in lacks)
    assert {"wrappers.py still has a TODO", "proof.py still has a TODO"} <= {*lacks}
    assert cli("lock", str(folder), "--site-packages", str(sandbox.site)).code == 0
    (folder / "wrappers.py").write_text(text.replace("TODO", "Steps").replace("original(number,", "original(0,", 1))
    said = (folder / "patch.toml").read_text("utf-8").replace("TODO: ", "")
    (folder / "patch.toml").write_text(said, "utf-8")
    looked = "from fakeengine.scheduler import Scheduler\n    return None if Scheduler().step(7) == [0] else 'it is 7'"
    proof = (folder / "proof.py").read_text("utf-8").replace('return "TODO: nothing was looked at"', looked)
    (folder / "proof.py").write_text(proof.replace("TODO: ", ""), "utf-8")
    done = cli("ready", str(out))
    assert (done.code, done.out) == (0, "my-fix: ready\n")
    where = ("--python", PYTHON, "--site-packages", str(sandbox.site))
    done = cli("prove", "--patch-dir", str(out), "--only", "my-fix", *where)
    assert " ".join(done.out.split()) == "my-fix proven stock shows the fault, patched is right in its one case"
    sandbox.generate()
    assert sandbox.python(USE_STEP).out == "[0]\n"
    assert sandbox.reported("my-fix")["state"] == "applied"


def test_each_wrapper_changes_nothing_as_it_is(sandbox: Sandbox, out: Path, cli: Cli) -> None:
    names = ("steps", "later", "given", "kept", "double")
    assert made(cli, sandbox, *(f"{MODULE}:Scheduler.{name}" for name in names)) == 0
    text = (out / "my_fix/wrappers.py").read_text("utf-8")
    assert "\n\n\n    " not in text
    assert cli("lock", str(out / "my_fix"), "--site-packages", str(sandbox.site)).code == 0
    sandbox.generate()
    done = sandbox.python(f"""
import asyncio
from {MODULE} import Scheduler
async def use():
    print([one async for one in Scheduler().steps(2)], await Scheduler().later(1), [*(await Scheduler().given())()])
asyncio.run(use())
print(Scheduler().kept(7), Scheduler().double(7))
""")
    assert (done.out, done.others) == ("[0, 1] None [1]\n7 14\n", [])
    assert sandbox.reported("my-fix")["state"] == "applied"


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (f"{MODULE}:Scheduler.stepp", "has no Scheduler.stepp; did you mean Scheduler.step?"),
        (f"{MODULE}:Kind.ONE", f"no wrapper can stand for {MODULE}:Kind.ONE: it is a member of an enumeration, "),
        (f"{MODULE}:Scheduler.given.inner", "each call of Scheduler.given makes it anew, "),
        ("fakeengine.nowhere:x", "there is no module fakeengine.nowhere"),
        ("fakeengine.scheduler", "is not module:qualname"),
    ],
)
def test_a_target_that_is_none(sandbox: Sandbox, out: Path, cli: Cli, target: str, line: str) -> None:
    module = sandbox.site / "fakeengine/scheduler.py"
    module.write_text(f"{module.read_text()}\nimport enum\nclass Kind(enum.Enum):\n    ONE = 1\n")
    place = ["--out", str(out), "--site-packages", str(sandbox.site)]
    done = cli("new", "my-fix", "--target", STEP, "--target", target, *place)
    assert done.code == 2
    assert line in done.err
    assert not (out / "my_fix").exists()


@pytest.mark.parametrize("name", ["limit", "size"])
def test_for_what_is_no_function_the_form_is_after_import(sandbox: Sandbox, out: Path, cli: Cli, name: str) -> None:
    assert made(cli, sandbox, f"{MODULE}:Scheduler.{name}") == 0
    folder = out / "my_fix"
    text = (folder / "wrappers.py").read_text("utf-8")
    assert f"livepatch.after_import(change_{name}, is_there_{name})" in text
    text = text.replace("    def is_there", f"        module.Scheduler.{name} = 7\n\n    def is_there")
    (folder / "wrappers.py").write_text(text.replace(f"{name} is not None", f"{name} == 7"), "utf-8")
    assert cli("lock", str(folder), "--site-packages", str(sandbox.site)).code == 0
    sandbox.generate()
    done = sandbox.python(f"import {MODULE} as m; print(m.Scheduler().{name})")
    assert done.out == "7\n", done
    assert sandbox.reported("my-fix")["state"] == "applied"


def test_names_that_are_taken_or_none(sandbox: Sandbox, out: Path, cli: Cli) -> None:
    assert made(cli, sandbox, STEP, name="failed-loads") == 2
    assert made(cli, sandbox, STEP, name="My Fix") == 2
    assert made(cli, sandbox, STEP, name="my_fix") == 0
    assert made(cli, sandbox, STEP) == 2


def test_what_is_counted_and_wrapped_is_looked_at(sandbox: Sandbox, out: Path, cli: Cli) -> None:
    assert made(cli, sandbox, STEP) == 0
    folder = out / "my_fix"
    assert cli("lock", str(folder), "--site-packages", str(sandbox.site)).code == 0
    text = (folder / "wrappers.py").read_text("utf-8")
    (folder / "wrappers.py").write_text(
        text.replace("        return original", '        livepatch.count("odd")\n        return original')
    )
    assert "what the counter odd means" in cli("ready", str(folder)).out
    (folder / "wrappers.py").write_text(text.replace(f'"{STEP}"', f'"{MODULE}:begin"'))
    assert f"wraps other targets than patch.toml names: {STEP}, {MODULE}:begin" in cli("ready", str(folder)).out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{}", f"wraps other targets than patch.toml names: {STEP}"),
        (f"{{STEP: step, '{MODULE}:begin': step}}", f"wraps other targets than patch.toml names: {MODULE}:begin"),
        ("{STEP: 3}", f"gives no function for {STEP}, but int"),
    ],
)
def test_wrappers_that_a_process_would_refuse_are_refused_by_all(
    sandbox: Sandbox, out: Path, cli: Cli, given: str, said: str
) -> None:
    assert made(cli, sandbox, STEP) == 0
    folder = out / "my_fix"
    lock = ("lock", str(folder), "--site-packages", str(sandbox.site))
    assert cli(*lock).code == 0
    code = (
        f"STEP = '{STEP}'\ndef wrappers(livepatch):\n    def step(original, *rest, **named): ...\n    return {given}\n"
    )
    (folder / "wrappers.py").write_text(code, "utf-8")
    for command in (lock, ("generate", "--patch-dir", str(out), "--patch", "my-fix", "--out", str(sandbox.root / "b"))):
        done = cli(*command)
        assert (done.code, done.err.count("\n"), said in done.err) == (2, 1, True), done
    check = ("check", "--patch-dir", str(out), "--only", "--site-packages", str(sandbox.site), "--json")
    done = cli(*check)
    (found,) = json.loads(done.out)["patches"]
    assert (done.code, found["reason"], found["detail"]) == (1, "mismatch", f"wrappers.py {said}")
    assert f"my-fix: a process refuses it: wrappers.py {said}" in cli(*check[:-1]).out
    assert f"wrappers.py {said}" in cli("ready", str(folder)).out


@pytest.mark.parametrize(
    ("proof", "lacks"),
    [("def cases(): return {", "proof.py is no Python: "), ("def case(): return {}", "proof.py defines no cases()")],
)
def test_what_prove_could_not_play(sandbox: Sandbox, out: Path, cli: Cli, proof: str, lacks: str) -> None:
    assert made(cli, sandbox, STEP) == 0
    (out / "my_fix/proof.py").write_text(proof)
    assert f"my-fix: {lacks}" in cli("ready", str(out)).out


def test_check_says_that_a_folder_is_not_locked_yet(sandbox: Sandbox, out: Path, cli: Cli) -> None:
    assert made(cli, sandbox, STEP) == 0
    line = f"{out}/my_fix has no patch.lock: vllm-livepatch lock {out}/my_fix --release VERSION"
    check = ("check", "--patch-dir", str(out), "--only", "--site-packages", str(sandbox.site))
    assert line in cli(*check).out.splitlines()
    assert cli("lock", str(out / "my_fix"), "--site-packages", str(sandbox.site)).code == 0
    assert "patch.lock" not in cli(*check).out


def test_a_coroutine_around_a_generator_is_refused(sandbox: Sandbox, out: Path, cli: Cli) -> None:
    assert made(cli, sandbox, f"{MODULE}:Scheduler.steps") == 0
    file = out / "my_fix/wrappers.py"
    text = file.read_text("utf-8").replace("    def steps", "    async def steps")
    file.write_text(text.replace("return original", "return await original"), "utf-8")
    done = cli("lock", str(out / "my_fix"), "--site-packages", str(sandbox.site))
    assert (done.code, "its wrapper is a coroutine function, and it is not" in done.err) == (2, True), done


@pytest.mark.parametrize("command", ["check", "prove", "generate"])
def test_a_patch_is_no_directory_of_patches(sandbox: Sandbox, out: Path, cli: Cli, command: str) -> None:
    """`lock` and `ready` take either."""
    assert made(cli, sandbox, STEP) == 0
    more = ["--out", str(sandbox.root / "b")] if command == "generate" else ["--site-packages", str(sandbox.site)]
    done = cli(command, "--patch-dir", str(out / "my_fix"), *more)
    line = f"vllm-livepatch: {out}/my_fix is a patch, not a directory of patches: --patch-dir {out}\n"
    assert (done.code, done.err) == (2, line)


@pytest.mark.parametrize("command", ["check", "generate"])
def test_code_that_is_no_python_is_said_before_a_process_finds_out(
    sandbox: Sandbox, out: Path, cli: Cli, command: str
) -> None:
    assert made(cli, sandbox, STEP) == 0
    (out / "my_fix/more.py").write_text("def", "utf-8")
    more = ["--out", str(sandbox.root / "b")] if command == "generate" else ["--site-packages", str(sandbox.site)]
    done = cli(command, "--patch-dir", str(out), *more)
    assert (done.code, "my_fix: invalid syntax (more.py, line 1)" in done.err) == (2, True), done
