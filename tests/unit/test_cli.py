"""The command line: what each command gives, and one line and exit 2 for every bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.unit.support import PATCHED, STEP, STOCK, USE_STEP, Done, Sandbox, finish, until

TOOL = [sys.executable, "-m", "vllm_livepatch.tools.cli"]
CHILD = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {USE_STEP!r}]).returncode)"


@pytest.fixture
def tool(sandbox: Sandbox) -> Tool:
    sandbox.patch()
    return Tool(sandbox)


class Tool:
    """The command line in a sandbox, whose own patches ride beside ours."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    def __call__(self, *words: str | Path, **more: str) -> Done:
        environ = self.sandbox.environ(
            path=[self.sandbox.site], XDG_CACHE_HOME=str(self.sandbox.root / "cache"), **more
        )
        return finish([*TOOL, *words], environ, cwd=self.sandbox.root)

    def files(self) -> set[str]:
        places = (file.relative_to(self.sandbox.root) for file in self.sandbox.root.rglob("*"))
        return {str(place) for place in places if "__pycache__" not in place.parts}


BAD = {
    "no such command": ["frobnicate"],
    "generate without a place": ["generate"],
    "generate: an unknown patch": ["generate", "--out", "new", "--patch", "nope"],
    "generate: a missing patch directory": ["generate", "--out", "new", "--patch-dir", "nowhere"],
    "generate: a patch directory without patches": ["generate", "--out", "new", "--patch-dir", "home"],
    "generate: broken TOML": ["generate", "--out", "new", "--patch-dir", "broken"],
    "generate: an unknown entry": ["generate", "--out", "new", "--patch-dir", "strange"],
    "generate: a patch without code": ["generate", "--out", "new", "--patch-dir", "codeless"],
    "generate: over a directory that is no bundle": ["generate", "--out", "site"],
    "generate: over a file": ["generate", "--out", "site/fakeengine/worker.py"],
    "generate: a colon in the place": ["generate", "--out", "a:b"],
    "generate: a zip over a file that is none": ["generate", "--zip", "site/fakeengine/worker.py"],
    "show: an unknown patch": ["show", "nope"],
    "show: no name": ["show"],
    "run: no command": ["run"],
    "run: a command that is not there": ["run", "--", "./not-there"],
    "run: an unknown patch": ["run", "--patch", "nope", "--", "true"],
    "check: no interpreter": ["check", "--python", "not-there"],
    "check: what is no interpreter": ["check", "--python", "/bin/false"],
    "check: no directory": ["check", "--site-packages", "nowhere"],
    "check: two places": ["check", "--python", sys.executable, "--site-packages", "site"],
    "status: no directory": ["status", "--state-dir", "nowhere"],
    "verify: nothing there": ["verify", "nowhere"],
    "verify: no bundle": ["verify", "site"],
    "verify: a file that is no zip": ["verify", "site/fakeengine/worker.py"],
    "verify: a damaged manifest": ["verify", "damaged"],
    "verify: a manifest without files": ["verify", "hollow"],
    "an unknown option": ["list", "--frob"],
    "from-diff: no such file": ["from-diff", "nowhere.diff", "--name", "mine", "--out", "new"],
    "from-diff: a bad name": ["from-diff", "some.diff", "--name", "My Patch", "--out", "new"],
}


@pytest.mark.parametrize("words", BAD.values(), ids=BAD.keys())
def test_bad_input(tool: Tool, words: list[str]) -> None:
    facts = 'title = "t"\npackage = "fakeengine"\ntargets = ["fakeengine.worker:work"]\n'
    manifests = {"damaged/manifest.json": "{", "hollow/manifest.json": "{}"}
    broken = {"broken/x/patch.toml": "title = [", "strange/x/patch.toml": facts + "frob = 1\n"}
    codeless = {"codeless/x/patch.toml": facts, "some.diff": "--- a/x\n"}
    tool.sandbox.write({**manifests, **broken, **codeless}, tool.sandbox.root)
    before = tool.files()
    done = tool(*words)
    assert (done.code, done.out, len(done.lines)) == (2, "", 1), done
    assert done.err.startswith("vllm-livepatch: ")
    assert "Traceback" not in done.err
    assert {name for name in tool.files() - before if not name.startswith("cache")} == set()


def test_generate_says_what_to_export_and_the_bundle_serves(tool: Tool) -> None:
    done = tool("generate", "--out", "new", "--zip", "new.zip", "--patch-dir", "patches", "--patch", "around")
    assert (done.code, done.err) == (0, "")
    for place in ("new", "new.zip"):
        path = tool.sandbox.root / place
        assert f"PYTHONPATH={path}" in done.out
        assert tool.sandbox.python(USE_STEP, path=[path, tool.sandbox.site]).out == PATCHED
        assert tool("verify", place).code == 0


def test_generate_replaces_an_older_bundle(tool: Tool) -> None:
    assert tool("generate", "--out", "new").code == 0
    (tool.sandbox.root / "new" / "left over").write_text("")
    assert tool("generate", "--out", "new", "--patch-dir", "patches").code == 0
    assert not (tool.sandbox.root / "new" / "left over").exists()
    assert tool("verify", "new").code == 0


def test_verify_names_every_difference(tool: Tool) -> None:
    tool("generate", "--out", "new")
    bundle = tool.sandbox.root / "new"
    (bundle / "sitecustomize.py").write_text("# mine\n")
    (bundle / "_vllm_livepatch" / "catalogue.json").unlink()
    (bundle / "more.py").write_text("")
    done = tool("verify", "new")
    assert done.code == 1
    assert done.out.splitlines() == [
        "_vllm_livepatch/catalogue.json is missing",
        "sitecustomize.py was changed",
        "more.py was added",
    ]


def test_run_reaches_children_and_gives_the_exit_code(tool: Tool) -> None:
    words = ["run", "--patch-dir", "patches", "--patch", "around", "--", sys.executable, "-c"]
    assert tool(*words, CHILD).out == PATCHED
    assert tool(*words, CHILD, LIVEPATCH="off").out == STOCK
    assert tool(*words, "import sys; sys.exit(7)").code == 7


def test_list_and_show(tool: Tool) -> None:
    done = tool("list", "--patch-dir", "patches", "--json")
    listed = {patch["name"]: patch for patch in json.loads(done.out)}
    assert listed["around"]["needed"] == ["1.0"]
    assert listed["stale-finished-recving"]["variable"] == "LIVEPATCH_STALE_FINISHED_RECVING"
    assert "around" in tool("list", "--patch-dir", "patches").out
    page = tool("show", "stale-finished-recving").out
    for part in ("assert req_id in self.requests", "LIVEPATCH_STALE_FINISHED_RECVING=off", "vllm#43226", "0.33.0"):
        assert part in " ".join(page.split())
    assert json.loads(tool("show", "around", "--patch-dir", "patches", "--json").out)["name"] == "around"


def test_check_judges_without_importing(tool: Tool) -> None:
    trap = "raise SystemExit('imported')\n"
    tool.sandbox.write({"fakeengine/__init__.py": trap})
    done = tool("check", "--site-packages", "site", "--patch-dir", "patches", "--json")
    answer = json.loads(done.out)
    assert (done.code, set(answer)) == (0, {"packages", "patches", "pairs"})
    assert answer["packages"] == {"fakeengine": "1.0"}
    (around,) = [patch for patch in answer["patches"] if patch["name"] == "around"]
    assert set(around) == {"name", "verdict", "reason", "detail", "targets"}
    assert around["verdict"] == "needed"
    assert around["targets"] == [{"target": STEP, "fingerprint": tool.sandbox.fingerprints(STEP)[STEP]}]
    others = {patch["verdict"] for patch in answer["patches"] if patch["name"] != "around"}
    assert others == {"not-present"}
    asked = tool("check", "--python", sys.executable, "--patch-dir", "patches", "--json")
    assert json.loads(asked.out)["packages"]["fakeengine"] == "1.0"


def test_check_exits_1_where_a_patch_is_wanted_and_cannot_apply(tool: Tool) -> None:
    scheduler = tool.sandbox.site / "fakeengine" / "scheduler.py"
    scheduler.write_text(scheduler.read_text().replace("[number]", "[number, 0]"))
    words = ["check", "--site-packages", "site", "--patch-dir", "patches"]
    done = tool(*words)
    assert (done.code, "drifted" in done.out) == (1, True)
    assert tool(*words, LIVEPATCH_AROUND="off").code == 0
    assert tool(*words, LIVEPATCH_AROUND="force").code == 0


def test_status_has_the_shape_of_the_contract(tool: Tool) -> None:
    tool.sandbox.generate()
    code = f"{USE_STEP}; import sys; sys.stdout.flush(); sys.stdin.read()"
    import subprocess

    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, env=tool.sandbox.environ()) as process:
        until(lambda: list(tool.sandbox.state.glob("*.json")) and tool.sandbox.reported()["counters"])
        (shown,) = json.loads(tool("status", "--json").out)
        text = tool("status", "--state-dir", tool.sandbox.state).out
        process.communicate(b"")
    assert set(shown) == {"pid", "host", "argv", "python", "started", "bundle", "packages", "patches"}
    assert (shown["pid"], shown["packages"]) == (process.pid, {"fakeengine": "1.0"})
    (around,) = shown["patches"]
    assert set(around) == {"name", "state", "reason", "detail", "verdict", "targets", "counters"}
    assert (around["state"], around["targets"], around["counters"]) == ("applied", [STEP], {"calls": 1})
    assert f"pid {process.pid}" in text
    assert "calls 1" in text
    ended = tool("status", "--json")
    assert (json.loads(ended.out), str(process.pid) in ended.err) == ([], True)
    assert list(tool.sandbox.state.glob("*.json")) == []
