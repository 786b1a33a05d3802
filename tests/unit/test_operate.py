"""docs/operate.md: its commands are there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize import settings, vllm_plugin
from vllm_livepatch.sitecustomize.decision import variable
from vllm_livepatch.sitecustomize.report_thread import HEARTBEAT_SECONDS
from vllm_livepatch.tools import deploy
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.in_bundle import command, reading

from tests.unit import fleet
from tests.unit.support import USE_STEP, Cli, Sandbox, finish

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operate.md").read_text("utf-8")
ALERTS = (ROOT / "tools/commands/monitoring/alerts.yml").read_text("utf-8")
COMMANDS = sorted(set(re.findall(r"vllm-livepatch ([a-z-]+)((?: (?!vllm-livepatch)[^`#\n|;>]+)?)", PAGE)))


@pytest.mark.parametrize(("command", "words"), COMMANDS)
def test_a_command_is_there(cli: Cli, command: str, words: str) -> None:
    output = cli(command, "--help")
    assert output.code == 0, command
    for option in re.findall(r"--[a-z-]+", words):
        assert option in output.out, (command, option)


def test_the_commands_were_found() -> None:
    assert {command for command, _ in COMMANDS} == {"check", "deploy", "generate", "show", "status", "verify"}


def test_what_it_names_is_there() -> None:
    entries = catalogue.load()
    known = {variable(name) for name in entries} | {"LIVEPATCH"}
    assert set(re.findall(r"\bLIVEPATCH(?:_[A-Z_]+)?\b", PAGE)) <= known
    for name in re.findall(r"(?:--require|show) ([a-z]+-[a-z-]+)", PAGE):
        assert name in entries
    for form in re.findall(r"deploy (\w+)", PAGE):
        assert form in {*deploy.FORMS, "prints"}


BUNDLED = sorted(set(re.findall(r"python3? /livepatch ([a-z]+(?: --require [a-z-]+| --[a-z-]+)*)", PAGE)))


@pytest.mark.parametrize("words", BUNDLED)
def test_a_command_of_the_bundle_is_there(words: str) -> None:
    assert command._parser().parse_args(words.split()).command.__name__ == f"_{words.split()[0]}"


def test_the_bundle_s_commands_were_found() -> None:
    assert {words.split()[0] for words in BUNDLED} == {"doctor", "status", "verify"}


def test_its_words_are_those_of_the_code() -> None:
    entries = catalogue.load()
    of_all = r"`([a-z]+(?:-[a-z]+)+)`"  # patches and reasons have a hyphen
    others = {"ddtrace-run", "opentelemetry-instrument"}
    assert set(re.findall(of_all, PAGE)) - others <= set(entries)
    (states,) = re.findall(r"has a state \(([^)]+)\)", PAGE)
    assert set(re.findall(r"`([a-z]+)`", states)) == set(reading.STATES)
    (off,) = re.findall(r"^(`0`.*) mean the same", PAGE, re.MULTILINE)
    assert {*re.findall(r"`(\w+)`", off), "off"} == {word for word, means in settings._SWITCH.items() if means == "off"}
    assert set(re.findall(r"Livepatch[A-Z]\w+", PAGE)) <= set(re.findall(r"alert: (\w+)", ALERTS))
    (mixed,) = re.findall(r"alert: LivepatchVersionsMixed\n.*\n +for: (\w+)", ALERTS)
    assert (mixed, "in use for an hour" in PAGE) == ("1h", True)
    assert (HEARTBEAT_SECONDS, "once a minute" in PAGE) == (60.0, True)
    assert (vllm_plugin.EXIT_STRICT, PAGE.count("78") > 1) == (78, True)
    assert "no bundle is armed in this process" in Path(vllm_plugin.__file__).read_text("utf-8")
    reasons = (ROOT / "docs/status.md").read_text("utf-8")
    for reason in ("drifted", "raised", "late"):
        assert f"`{reason}`" in PAGE
        assert re.search(rf"^\| `\w+` \| `{reason}`", reasons, re.MULTILINE), reason


def test_what_is_turned_off_on_kubernetes_is_what_deploy_prints() -> None:
    lines = re.findall(r"^kubectl set env .*", PAGE, re.MULTILINE)
    printed = deploy.text("kubernetes", "IMAGE", "MODEL")
    assert len(lines) == 3
    for line in lines:
        assert f"#   {line.partition('   #')[0]}\n" in printed
    (name,) = re.findall(r"kubectl rollout undo deployment/(\w+)", PAGE)
    assert f"deployment/{name} " in lines[0]


def test_what_is_turned_off_for_a_job_reaches_its_engine(tmp_path: Path) -> None:
    """The printed job's `srun` is stood in for; Slurm's own hands on what `sbatch` was called with."""
    (name, value) = re.findall(r"`(LIVEPATCH_[A-Z_]+)=(\w+) sbatch JOB`", PAGE)[0]
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\necho ${name}\n")
    srun.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/home/me", "SLURM_JOB_ID": "7", name: value}
    done = finish(["bash", "-c", deploy.text("slurm", "image", "model")], environ)
    assert (done.code, set(done.out.split())) == (0, {value})


def test_a_patch_that_is_turned_off_is_shown_so(patched: Sandbox) -> None:
    assert "shows the patch as `skipped`, `off`" in PAGE
    patched.python(USE_STEP, LIVEPATCH_AROUND="off", LIVEPATCH_STATE_KEEP="1")
    assert (patched.reported()["state"], patched.reported()["reason"]) == ("skipped", "off")


def test_the_loop_over_all_pods(tmp_path: Path) -> None:
    """`kubectl` and the pods' `python3` are stood in for."""
    (loop,) = re.findall(r"^for pod in .*?^done$", PAGE, re.MULTILINE | re.DOTALL)
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(  # the bundle of c was emptied: Python exits 0 and says nothing
        "#!/bin/sh\ncase $1 in get) echo pod/a; echo pod/b; echo pod/c;;\n"
        'exec) test "$3 $4 $5 $6" = "-- python3 /livepatch status" || exit 9; test "$2" = pod/c && exit; echo noise\n'
        'test "$2" = pod/a;; esac\n'
    )
    kubectl.chmod(0o755)
    done = finish(["bash", "-c", loop], {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (done.code, done.out, done.err) == (0, "pod/a yes\npod/b NO\npod/c NO\n", "")


def test_one_that_only_waits_for_its_target_is_enough(cli: Cli, tmp_path: Path) -> None:
    assert "`armed` is enough" in PAGE
    fleet.leave(tmp_path, fleet.patch("around", "armed"))
    assert cli("status", "--state-dir", str(tmp_path), "--require", "around").code == 0


def test_it_can_be_read_in_ten_minutes() -> None:
    """At 200 words a minute, which is slow; what stands in code blocks is looked up, not read."""
    assert len(re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL).split()) < 2000
