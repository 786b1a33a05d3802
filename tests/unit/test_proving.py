"""`prove`, and what becomes of code that a patch was proven on: with a package and patches made for it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.support import DEADLINE, PYTHON, STEP, USE_STEP, WORK, Cli, Done, Sandbox, until
from tests.unit.test_changed_module import diff_patch

NUMBERED = """\
    def wrappers(livepatch):
        def around(wrapped, instance, args, kwargs):
            return [livepatch.facts.get("mark", "patched"), *wrapped(*args, **kwargs)]

        return dict.fromkeys(TARGETS, around)
    """
PROOF = """\
    from fakeengine.scheduler import Scheduler

    def step():
        found = Scheduler().step(7)
        return None if found == ["patched", 7] else f"a step gives {found}"

    def freed():
        return None if Scheduler().free() == "freed" else "nothing is freed"

    def cases():
        return {"A step's result is marked.": step, "What is freed is freed.": freed()}
    """
CHANGED = """\
    class Scheduler:
        def step(self, number):
            result = [number]
            return result

        def free(self):
            return "freed"
    """


def proof(sandbox: Sandbox, text: str = PROOF, name: str = "around") -> None:
    sandbox.write({"proof.py": text}, sandbox.patches / name)


def prove(sandbox: Sandbox, cli: Cli, *arguments: str) -> Done:
    words = ("--patch-dir", str(sandbox.patches), "--only", "--python", PYTHON, "--site-packages", str(sandbox.site))
    return cli("prove", *words, *arguments)


def outcome(sandbox: Sandbox, cli: Cli, *arguments: str) -> dict[str, Any]:
    """What is said of the one patch."""
    (found,) = json.loads(prove(sandbox, cli, "--json", *arguments).out)["patches"]
    return dict(found)


@pytest.fixture
def drifted(sandbox: Sandbox) -> Sandbox:
    """Code that differs from what the patch was made for, harmlessly."""
    sandbox.patch()
    proof(sandbox)
    sandbox.write({"fakeengine/scheduler.py": CHANGED})
    return sandbox


def test_the_fault_shows_and_is_gone(drifted: Sandbox, cli: Cli) -> None:
    done = prove(drifted, cli)
    assert done.code == 0, done.err
    assert " ".join(done.out.split()) == "around proven stock shows the fault, patched is right in all 2 cases"
    cases = outcome(drifted, cli)["cases"]
    assert cases == {
        "A step's result is marked.": {"stock": "a step gives [7]", "patched": None},
        "What is freed is freed.": {"stock": None, "patched": None},
    }


def test_proven_code_is_patched_and_no_other(drifted: Sandbox, cli: Cli, tmp_path: Path) -> None:
    """Under auto, with the verdict in the report and in the one line; another change drifts as ever."""
    file, place = tmp_path / "proofs.json", tmp_path / "bundle"
    assert prove(drifted, cli, "--out", str(file)).code == 0
    dirs = ("--patch-dir", str(drifted.patches))
    check = ("check", *dirs, "--only", "--site-packages", str(drifted.site))
    assert cli(*check).code == 1
    assert "proven" in cli(*check, "--proofs", str(file)).out
    made = cli("generate", *dirs, "--patch", "around", "--proofs", str(file), "--out", str(place))
    assert made.code == 0, made.err
    again = cli("generate", *dirs, "--patch", "around", "--proofs", str(file), "--out", str(tmp_path / "again"))
    assert made.out.splitlines()[1] == again.out.splitlines()[1]  # the digest
    assert not list(place.rglob("proof.py"))

    done = drifted.python(USE_STEP, path=[place, drifted.site])
    assert done.out == "['patched', 7]\n"
    assert "applied=around proven=around " in done.greeting
    assert {key: drifted.reported()[key] for key in ("state", "verdict")} == {"state": "applied", "verdict": "proven"}

    drifted.write({"fakeengine/scheduler.py": CHANGED.replace("result = [number]", "result = [number, 8]")})
    done = drifted.python(USE_STEP, path=[place, drifted.site])
    assert done.out == "[7, 8]\n"
    assert "failed=around " in done.greeting


def test_stock_is_right(sandbox: Sandbox, cli: Cli, tmp_path: Path) -> None:
    """Code that has no fault is fixed upstream, also where a listed release has it."""
    sandbox.patch()
    proof(sandbox, PROOF.replace('["patched", 7]', "[7]"))
    assert outcome(sandbox, cli)["outcome"] == "no-fault"
    file = tmp_path / "proofs.json"
    assert prove(sandbox, cli, "around", "--out", str(file)).code == 0
    check = ("check", "--patch-dir", str(sandbox.patches), "--only", "--site-packages", str(sandbox.site))
    (judged,) = json.loads(cli(*check, "--proofs", str(file), "--json").out)["patches"]
    assert (judged["verdict"], judged["reason"]) == ("fixed-upstream", "fixed-upstream")


def test_patched_is_wrong(drifted: Sandbox, cli: Cli, tmp_path: Path) -> None:
    """It is refused from then on, also under force."""
    proof(drifted, PROOF.replace('["patched", 7]', '["mended", 7]'))
    file, place = tmp_path / "proofs.json", tmp_path / "bundle"
    done = prove(drifted, cli, "--out", str(file))
    assert done.code == 1
    assert "failed    A step's result is marked.: a step gives ['patched', 7]" in done.out
    dirs = ("--patch-dir", str(drifted.patches))
    assert cli("generate", *dirs, "--patch", "around", "--proofs", str(file), "--out", str(place)).code == 0
    done = drifted.python(USE_STEP, path=[place, drifted.site], LIVEPATCH_AROUND="force")
    assert done.out == "[7]\n"
    assert drifted.reported()["reason"] == "disproven"
    assert "its proof failed on exactly this code" in drifted.reported()["detail"].replace("the patch's", "its")


def test_facts_are_tried_and_one_must_pass(sandbox: Sandbox, cli: Cli, tmp_path: Path) -> None:
    code = sandbox.fingerprints(STEP)
    other = dict.fromkeys(code, "0" * 16)
    forms = [
        {"releases": ["1.0"], "code": code, "facts": {"mark": "marked"}},
        {"releases": ["0.9"], "code": other},
    ]
    sandbox.patch(code=NUMBERED, variant=forms)
    sandbox.write({"fakeengine/scheduler.py": CHANGED})
    proof(sandbox)
    found = outcome(sandbox, cli)
    assert (found["outcome"], found["facts"]) == ("proven", {})
    proof(sandbox, PROOF.replace('found == ["patched", 7]', "len(found) == 2"))
    found = outcome(sandbox, cli, "around")
    assert (found["outcome"], found["reason"]) == ("not-run", "ambiguous")
    assert prove(sandbox, cli, "--require", "around").code == 1


def test_names_that_did_not_drift_single_out_the_facts(sandbox: Sandbox, cli: Cli) -> None:
    """Both sets pass; the code of `free` is that of one."""
    free = "fakeengine.scheduler:Scheduler.free"
    code = sandbox.fingerprints(STEP, free)
    forms = [
        {"releases": ["1.0"], "code": code, "facts": {"mark": "marked"}},
        {"releases": ["0.9"], "code": {**code, free: "0" * 16}},
    ]
    sandbox.patch(code=NUMBERED, variant=forms, calls=[free])
    sandbox.write({"fakeengine/scheduler.py": CHANGED})
    proof(sandbox, PROOF.replace('found == ["patched", 7]', "len(found) == 2"))
    found = outcome(sandbox, cli)
    assert (found["outcome"], found["facts"]) == ("proven", {"mark": "marked"})


@pytest.mark.parametrize(
    ("changed", "trouble"),
    [
        ("from fakeengine.scheduler import Schedulers as Scheduler", "cannot import name 'Schedulers'"),
        ("from elsewhere import Scheduler", "No module named 'elsewhere'"),
        ("from fakeengine.scheduler import Scheduler; Scheduler().start", "has no attribute 'start'"),
    ],
)
def test_a_proof_that_does_not_fit_finds_nothing(drifted: Sandbox, cli: Cli, changed: str, trouble: str) -> None:
    proof(drifted, PROOF.replace("from fakeengine.scheduler import Scheduler", changed))
    found = outcome(drifted, cli)
    assert (found["outcome"], found["reason"]) == ("not-run", "not-built")
    assert trouble in found["detail"]


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("def case(): ...", "proof.py defines no cases()"),
        ("cases = {}", "proof.py defines no cases()"),
        ("def cases(): return [look]\ndef look(): ...", "cases() of proof.py gives a list, not functions by their"),
    ],
)
def test_a_proof_without_cases_is_told_of_by_its_own_file(drifted: Sandbox, cli: Cli, text: str, trouble: str) -> None:
    proof(drifted, text)
    found = outcome(drifted, cli)
    assert (found["outcome"], found["reason"]) == ("not-run", "not-built")
    assert found["detail"].startswith(trouble)


def test_a_case_that_uses_what_is_not_there_is_no_finding(drifted: Sandbox, cli: Cli) -> None:
    proof(drifted, PROOF.replace("Scheduler().step(7)", "Scheduler().step(7, later=True)"))
    found = outcome(drifted, cli)
    assert (found["outcome"], found["reason"]) == ("not-run", "not-built")
    assert "later" in found["detail"]


def test_what_the_code_raises_is_a_finding(sandbox: Sandbox, cli: Cli) -> None:
    sandbox.write({"fakeengine/scheduler.py": CHANGED.replace("[number]", "[number.real.missing]")})
    sandbox.patch()
    proof(sandbox)
    found = outcome(sandbox, cli)
    assert (found["outcome"], found["detail"]) == (
        "failed",
        "A step's result is marked.: AttributeError in step (stock too)",
    )


def test_changed_code_that_the_proof_does_not_import_is_not_proven(sandbox: Sandbox, cli: Cli) -> None:
    """Nothing was seen of it: neither of a target nor of what the patch calls."""
    sandbox.patch(targets=[STEP, WORK], per_module=True)
    proof(sandbox)
    sandbox.write({"fakeengine/scheduler.py": CHANGED})
    assert outcome(sandbox, cli)["outcome"] == "proven"  # `work` is as a release has it
    sandbox.write({"fakeengine/worker.py": "def work(item):\n    return [item, 8]\n"})
    found = outcome(sandbox, cli)
    assert (found["outcome"], found["reason"]) == ("not-run", "not-built")
    assert f"no release has this code of {WORK}, and the proof does not import it" in found["detail"]


def test_facts_that_fit_and_are_not_seen_are_not_disproven_by_others(sandbox: Sandbox, cli: Cli) -> None:
    """With the facts that fit every case is right, and code is left that the proof does not import."""
    free = "fakeengine.scheduler:Scheduler.free"
    code = sandbox.fingerprints(STEP, WORK, free)
    forms = [
        {"releases": ["0.9"], "code": {**code, free: "0" * 16}, "facts": {"mark": "marked"}},
        {"releases": ["1.0"], "code": code},
    ]
    sandbox.patch(code=NUMBERED, variant=forms, targets=[STEP, WORK], calls=[free], per_module=True)
    proof(sandbox)
    sandbox.write(
        {"fakeengine/scheduler.py": CHANGED, "fakeengine/worker.py": "def work(item):\n    return [item, 8]\n"}
    )
    found = outcome(sandbox, cli)
    assert (found["outcome"], found["reason"]) == ("not-run", "not-built")
    assert f"no release has this code of {WORK}" in found["detail"]


def test_no_proof(sandbox: Sandbox, cli: Cli) -> None:
    """Nothing stands for drifted code; for code that is known to need the patch its fingerprints do."""
    sandbox.patch()
    done = prove(sandbox, cli, "around")
    assert (done.code, done.out.split()[:3]) == (0, ["around", "not-run", "no-proof:"])
    sandbox.write({"fakeengine/scheduler.py": CHANGED})
    assert prove(sandbox, cli).code == 0
    assert prove(sandbox, cli, "around").code == 1


def test_nothing_is_written_beside_the_code(drifted: Sandbox, cli: Cli) -> None:
    before = sorted(drifted.site.rglob("*"))
    assert prove(drifted, cli).code == 0
    assert sorted(drifted.site.rglob("*")) == before
    assert not list(drifted.patches.rglob("__pycache__"))


def test_a_bundle_of_the_caller_s_does_not_make_stock_right(
    drifted: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    drifted.patch("around")  # as the code is now: needed
    drifted.generate()
    monkeypatch.setenv("PYTHONPATH", f"{drifted.bundle}{os.pathsep}{drifted.site}")
    assert outcome(drifted, cli)["cases"]["A step's result is marked."]["stock"] == "a step gives [7]"


def test_one_that_hangs_is_ended(drifted: Sandbox, cli: Cli, tmp_path: Path) -> None:
    """With what it started."""
    here = tmp_path / "pid"
    hang = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open({str(here)!r}, "w").write(str(child.pid))
child.wait()
"""
    drifted.write({"proof.py": hang}, drifted.patches / "around")
    found = outcome(drifted, cli, "--timeout", "5")
    assert (found["outcome"], found["reason"]) == ("not-run", "not-built")
    assert "it was not done after 5 s" in found["detail"]
    until(lambda: _gone(int(here.read_text())))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_it_ends_with_its_caller(
    drifted: Sandbox, tmp_path: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, temporary = tmp_path / "pid", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    hang = f'import os, signal\nopen({str(here)!r}, "w").write(str(os.getpid()))\nsignal.pause()\n'
    drifted.write({"proof.py": hang}, drifted.patches / "around")
    words = ["--patch-dir", str(drifted.patches), "--only", "--python", PYTHON, "--site-packages", str(drifted.site)]
    with subprocess.Popen([sys.executable, "-m", "vllm_livepatch", "prove", *words], stderr=subprocess.PIPE) as asked:
        until(lambda: here.exists() and here.read_text())
        asked.send_signal(how)
        assert asked.wait(DEADLINE) == (-how if how == signal.SIGKILL else 128 + how)
        assert how == signal.SIGKILL or not list(temporary.iterdir())
    until(lambda: _gone(int(here.read_text())))


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


def test_site_packages_alone_are_those_of_their_own_environment(drifted: Sandbox, cli: Cli, tmp_path: Path) -> None:
    """Or, where they are in none, they are proven with the interpreter that runs the command."""
    words = ["--patch-dir", str(drifted.patches), "--only"]
    done = cli("prove", *words, "--site-packages", str(drifted.site))
    assert (done.code, done.out.split()[1]) == (0, "proven"), done
    site = tmp_path / "own/lib/python3/site-packages"
    site.parent.mkdir(parents=True)
    drifted.site.rename(site)
    python = tmp_path / "own/bin/python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    done = cli("prove", *words, "--site-packages", str(site))
    assert (done.code, f"{python} cannot say" in done.err) == (2, True), done


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--python", PYTHON), "has no fakeengine: there is nothing to prove"),
        (("--python", PYTHON, "--site-packages", "MISSING"), "is not a directory"),
        (("arround",), "did you mean around?"),
        (("--out", "MISSING/proofs.json", "--python", PYTHON), "cannot be written: its directory is not there"),
    ],
)
def test_bad_input_is_one_line(drifted: Sandbox, cli: Cli, arguments: tuple[str, ...], sentence: str) -> None:
    places = {"SITE": str(drifted.site), "MISSING": str(drifted.root / "missing")}
    words = [
        word.replace("MISSING", places["MISSING"]) if "MISSING" in word else places.get(word, word)
        for word in arguments
    ]
    done = cli("prove", "--patch-dir", str(drifted.patches), "--only", *words)
    assert (done.code, len(done.lines)) == (2, 1), done
    assert sentence in done.err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[", "is not what prove --out writes"),
        ("[" * 100_000, "is not what prove --out writes"),
        ("[]", "is not what prove --out writes"),
        ('{"format": 2, "patches": {}}', "has format 2: this version knows 1"),
        ('{"format": 1, "patches": {"around": 1}}', "is not what prove --out writes"),
        ('{"format": 1, "patches": {"around": {"outcome": "proven"}}}', "around has changed since it was proven"),
    ],
)
def test_a_file_that_is_none_of_proofs(sandbox: Sandbox, cli: Cli, tmp_path: Path, content: str, sentence: str) -> None:
    sandbox.patch()
    file = tmp_path / "proofs.json"
    file.write_text(content)
    done = cli("generate", "--patch-dir", str(sandbox.patches), "--proofs", str(file), "--out", str(tmp_path / "out"))
    assert (done.code, len(done.lines)) == (2, 1), done
    assert sentence in done.err
    assert not (tmp_path / "out").exists()


def test_a_patch_that_changed_since_is_not_taken_for_proven(drifted: Sandbox, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "proofs.json"
    assert prove(drifted, cli, "--out", str(file)).code == 0
    proof(drifted, PROOF + "\n    # more words change nothing of the patch\n")
    dirs = ("--patch-dir", str(drifted.patches))
    assert cli("generate", *dirs, "--proofs", str(file), "--out", str(tmp_path / "same")).code == 0
    wrappers = drifted.patches / "around" / "wrappers.py"
    wrappers.write_text(wrappers.read_text().replace('"patched"', '"changed"'))
    done = cli("generate", *dirs, "--proofs", str(file), "--out", str(tmp_path / "other"))
    assert (done.code, len(done.lines)) == (2, 1), done
    assert "around has changed since it was proven: run prove again" in done.err


@pytest.mark.parametrize(
    ("cases", "detail"),
    [
        ('{"A": step} if stock else {"B": right}', "patched: a case of stock's was not played: A"),
        ('{"A": step, 1: right}', "its proof has a case whose name is no text"),
        ('{"A": step, "B": later}', "B: a case gives something to be awaited, and is not awaited"),
    ],
)
def test_cases_that_cannot_be_compared_prove_nothing(drifted: Sandbox, cli: Cli, cases: str, detail: str) -> None:
    """The one that shows the fault is not played once the code is patched; two that JSON takes for one."""
    head = PROOF.partition("    def cases")[0]
    rest = f"    async def later():\n        pass\n\n    right = lambda: None\n    stock = Scheduler().step(7) == [7]\n\n    def cases():\n        return {cases}\n"
    proof(drifted, head + rest)
    found = outcome(drifted, cli)
    assert (found["outcome"], found["reason"]) == ("not-run", "not-built")
    assert found["detail"].startswith(detail)


def test_a_text_of_the_engine_s_is_one_line_without_secrets(drifted: Sandbox, cli: Cli, tmp_path: Path) -> None:
    """On the screen and in each process's line: neither lines of its own nor what a terminal obeys."""
    proof(drifted, PROOF.replace("a step gives {found}", "two\\nlines \\x1b[2J \\ud800 api_key=sesame {found}"))
    file, place = tmp_path / "proofs.json", tmp_path / "bundle"
    proof_text = (drifted.patches / "around" / "proof.py").read_text()
    (drifted.patches / "around" / "proof.py").write_text(proof_text.replace('["patched", 7]', "[]"))
    done = prove(drifted, cli, "--out", str(file))
    assert (done.code, len(done.out.splitlines()), done.err) == (1, 1, "")
    assert "two lines ?[2J ? api_key=***" in done.out
    assert "sesame" not in file.read_text()
    made = cli("generate", "--patch-dir", str(drifted.patches), "--proofs", str(file), "--out", str(place))
    assert made.code == 0, made.err
    drifted.python(USE_STEP, path=[place, drifted.site])
    assert drifted.reported()["reason"] == "disproven"
    assert drifted.reported()["detail"].isprintable()


def test_what_it_leaves_is_no_obstacle(drifted: Sandbox, cli: Cli) -> None:
    """A proof that removes its directory, and one whose child process writes no report: other patches are played."""
    for act in ('__import__("shutil").rmtree(here)', 'open(f"{here}/state/x.json", "w").write("{")'):
        proof(drifted, PROOF + f'\n    here = __import__("os").environ["HOME"]\n    {act}\n')
        done = prove(drifted, cli)
        assert (done.code, done.err, len(done.out.splitlines())) == (0, "", 1)


def test_what_starts_with_the_interpreter_may_print(drifted: Sandbox, cli: Cli) -> None:
    drifted.write({"sitecustomize.py": 'print("hello")\n'})
    assert outcome(drifted, cli)["outcome"] == "proven"


def test_an_interpreter_is_named_from_where_the_caller_is(
    drifted: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (drifted.root / "python").symlink_to(PYTHON)
    monkeypatch.chdir(drifted.root)
    assert prove(drifted, cli, "--python", "./python").out.split()[:2] == ["around", "proven"]


def test_packages_are_those_that_the_engine_has(
    drifted: Sandbox, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the caller's home or in a zip file; not what lies where the caller happens to be."""
    words = ("prove", "--patch-dir", str(drifted.patches), "--only", "--python", PYTHON)
    monkeypatch.setenv("PYTHONPATH", shutil.make_archive(str(tmp_path / "engine"), "zip", drifted.site))
    assert cli(*words).out.split()[:2] == ["around", "proven"]
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(drifted.site)
    done = cli(*words)
    assert (done.code, "there is nothing to prove" in done.err) == (2, True)
    base = tmp_path / "base"
    version = subprocess.run(
        [PYTHON, "-c", "import site, sys; print(site.getusersitepackages())"],
        env={"PYTHONUSERBASE": str(base)},
        capture_output=True,
        text=True,
    ).stdout.strip()
    shutil.copytree(drifted.site, version)
    monkeypatch.setenv("PYTHONUSERBASE", str(base))
    assert cli(*words).out.split()[:2] == ["around", "proven"]


def test_a_device_is_not_replaced_and_a_link_stays_one(drifted: Sandbox, cli: Cli, tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "proofs.json"
    os.mkfifo(pipe)
    done = prove(drifted, cli, "--out", str(pipe))
    assert (done.code, done.out, "it is no regular file" in done.err) == (2, "", True)
    assert pipe.is_fifo()
    link.symlink_to(file)
    assert prove(drifted, cli, "--out", str(link)).code == 0
    assert link.is_symlink()
    assert json.loads(file.read_text())["format"] == 1


def test_a_companion_that_has_none_of_the_names_is_not_one_that_is_absent(
    sandbox: Sandbox, cli: Cli, tmp_path: Path
) -> None:
    """Proven without it, the patch is not applied beside one whose code lies elsewhere; prove says so, too."""
    name = "fakecache.helper:assist"
    companion = {
        "fakecache/__init__.py": "",
        "fakecache/_version.py": '__version__ = "3.0"\n',
        "fakecache/helper.py": "def other():\n    return 1\n",
    }
    known = [{"package": "fakecache", "releases": ["2.0"], "code": {name: "0" * 16}}]
    variant = [{"releases": ["1.0"], "code": sandbox.fingerprints(STEP)}]
    sandbox.patch(calls=[name], companion=known, variant=variant)
    sandbox.write({"fakeengine/scheduler.py": CHANGED})
    proof(sandbox)
    file, place = tmp_path / "proofs.json", tmp_path / "bundle"
    assert prove(sandbox, cli, "--out", str(file)).out.split()[:2] == ["around", "proven"]
    made = cli("generate", "--patch-dir", str(sandbox.patches), "--proofs", str(file), "--out", str(place))
    assert made.code == 0, made.err
    assert sandbox.python(USE_STEP, path=[place, sandbox.site]).out == "['patched', 7]\n"
    sandbox.write(companion)
    assert sandbox.python(USE_STEP, path=[place, sandbox.site]).out == "[7]\n"
    found = outcome(sandbox, cli)
    assert (found["outcome"], found["reason"]) == ("not-run", "gone")
    assert "fakecache 3.0 has no fakecache.helper:assist" in found["detail"]


def test_a_target_that_the_proof_does_not_import(sandbox: Sandbox, cli: Cli) -> None:
    """All or nothing: not applied. Where each module is patched by itself, it is said that nothing was seen of it."""
    sandbox.patch(targets=[STEP, WORK])
    sandbox.write({"fakeengine/scheduler.py": CHANGED})
    proof(sandbox)
    found = outcome(sandbox, cli)
    assert (found["outcome"], found["reason"]) == ("not-run", "not-imported")
    known = {STEP: "0" * 16, **sandbox.fingerprints(WORK)}
    sandbox.patch(targets=[STEP, WORK], per_module=True, variant=[{"releases": ["1.0"], "code": known}])
    found = outcome(sandbox, cli)
    assert found["outcome"] == "proven"
    assert found["detail"].endswith("; of 1 of 2 targets imported so far")


@pytest.mark.parametrize("order", [("good", "bad"), ("bad", "good")])
def test_of_merged_proofs_one_that_failed_counts(
    drifted: Sandbox, cli: Cli, tmp_path: Path, order: tuple[str, str]
) -> None:
    """And proofs that a bundle has stay beside those of a file, which are of other code."""
    file, dirs = tmp_path / "proofs.json", ("--patch-dir", str(drifted.patches), "--patch", "around")
    assert prove(drifted, cli, "--out", str(file)).code == 0
    content = json.loads(file.read_text())
    for name, outcome_ in (("good", "proven"), ("bad", "failed")):
        content["patches"]["around"]["outcome"] = outcome_
        file.write_text(json.dumps(content))
        assert cli("generate", *dirs, "--proofs", str(file), "--out", str(tmp_path / name)).code == 0
    merged = [word for name in order for word in ("--bundle", str(tmp_path / name))]
    assert cli("generate", *dirs, *merged, "--out", str(tmp_path / "both")).code == 0
    assert drifted.python(USE_STEP, path=[tmp_path / "both", drifted.site]).out == "[7]\n"
    content["patches"]["around"]["code"] = {STEP: "0" * 16}
    file.write_text(json.dumps(content))
    more = ("--bundle", str(tmp_path / "good"), "--proofs", str(file), "--out", str(tmp_path / "more"))
    assert cli("generate", *dirs, *more).code == 0
    assert drifted.python(USE_STEP, path=[tmp_path / "more", drifted.site]).out == "['patched', 7]\n"


HARMLESS = {"fakeengine/scheduler.py": ("return [number]", "result = [number]\n        return result")}
MENDING = {"fakeengine/scheduler.py": ("return [number]", 'return ["patched", number]')}
WRONG = {"fakeengine/scheduler.py": ("return [number]", "return [number, 8]")}


@pytest.mark.parametrize(
    ("change", "found", "said", "answer", "state"),
    [
        (HARMLESS, "proven", "right in all 2 cases; as changed by mine", "['patched', 7]", "applied"),
        (MENDING, "no-fault", "stock is right in all cases; as changed by mine", "['patched', 7]", "skipped"),
        (WRONG, "failed", "a step gives ['patched', 7, 8]; as changed by mine", "[7, 8]", "skipped"),
    ],
)
def test_a_diff_of_ones_own_is_beneath_what_is_proven(
    sandbox: Sandbox, cli: Cli, tmp_path: Path, change: Any, found: str, said: str, answer: str, state: str
) -> None:
    """A wrapper is put around the code that a diff makes where its proof was run on that, and only there."""
    sandbox.patch()
    proof(sandbox)
    diff_patch(sandbox, change, name="mine")
    file, place = tmp_path / "proofs.json", tmp_path / "bundle"
    done = prove(sandbox, cli, "around", "--out", str(file))
    assert " ".join(done.out.split()).startswith(f"around {found}")
    assert done.out.strip().endswith(said)
    dirs = ("--patch-dir", str(sandbox.patches))
    chosen = ("--patch", "around", "--patch", "mine")
    assert cli("generate", *dirs, *chosen, "--proofs", str(file), "--out", str(place)).code == 0
    ended = sandbox.python(USE_STEP, path=[place, sandbox.site], LIVEPATCH="auto" if found == "failed" else "strict")
    assert (ended.out, ended.code) == (f"{answer}\n", 0), ended.err
    assert sandbox.reported()["state"] == state
    if found == "proven":
        assert (
            sandbox.reported()["detail"]
            == "fakeengine 1.0 as changed by mine; the patch was proven on exactly this code"
        )
    (checked,) = (
        one
        for one in json.loads(
            cli("check", *dirs, "--only", "--proofs", str(file), "--site-packages", str(sandbox.site), "--json").out
        )["patches"]
        if one["name"] == "around"
    )
    assert checked["verdict"] == {"proven": "proven", "no-fault": "fixed-upstream", "failed": "drifted"}[found]


def test_what_a_diff_that_does_not_hold_shows_is_of_other_code(sandbox: Sandbox, cli: Cli) -> None:
    """It raises as it is imported, and the release's own text runs."""
    sandbox.patch()
    proof(sandbox)
    diff_patch(sandbox, {"fakeengine/scheduler.py": ("return [number]", "return [number]\n\n    boom()")}, name="mine")
    found = outcome(sandbox, cli, "around")
    assert (found["outcome"], found["reason"]) == ("not-run", "not-built")
    assert found["detail"].startswith("mine is not applied (raised): fakeengine.scheduler as changed: NameError")


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"code": {}}, "a proof names the code that it was run on"),
        ({"code": {STEP: 5}}, "a proof has a fingerprint of each name that it was run on"),
        ({"code": {STEP: "unknown"}}, "a proof has a fingerprint of each name that it was run on"),
        ({"code": {WORK: "0" * 16}}, "a proof's code is that of a target, and of no other names than the patch's"),
        ({"facts": [["mark", "x"]]}, "a proof's facts are a table, and its detail is a text"),
        ({"facts": None}, "a proof's facts are a table, and its detail is a text"),
        ({"detail": ["x"]}, "a proof's facts are a table, and its detail is a text"),
    ],
)
def test_an_entry_that_prove_does_not_write(
    drifted: Sandbox, cli: Cli, tmp_path: Path, entry: dict[str, Any], sentence: str
) -> None:
    file = tmp_path / "proofs.json"
    assert prove(drifted, cli, "--out", str(file)).code == 0
    content = json.loads(file.read_text())
    content["patches"]["around"].update(entry)
    file.write_text(json.dumps(content))
    dirs = ("--patch-dir", str(drifted.patches), "--patch", "around")
    done = cli("generate", *dirs, "--proofs", str(file), "--out", str(tmp_path / "out"))
    assert (done.code, len(done.lines)) == (2, 1), done
    assert sentence in done.err


@pytest.mark.parametrize("settings", [{"PYTHONIOENCODING": "ascii"}, {}])
def test_a_terminal_without_the_letters_and_none_at_all(
    drifted: Sandbox, tmp_path: Path, settings: dict[str, str]
) -> None:
    """A traceback would lose what was found."""
    proof(drifted, PROOF.replace("a step gives", "ein Schritt \u00fcber").replace('["patched", 7]', "[]"))
    file = tmp_path / "proofs.json"
    words = ["--patch-dir", str(drifted.patches), "--only", "--python", PYTHON, "--site-packages", str(drifted.site)]
    program = [sys.executable, "-m", "vllm_livepatch", "prove", *words, "--out", str(file)]
    closed = [] if settings else ["bash", "-c", '"$@" 2>&-', "bash"]
    ended = subprocess.run([*closed, *program], env={**os.environ, **settings}, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "ein Schritt" in ended.stdout
    assert json.loads(file.read_text())["patches"]["around"]["outcome"] == "failed"
