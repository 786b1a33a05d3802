"""The files that a forge, an editor or pre-commit reads: each parses, fits its schema, and names what is there."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm_livepatch.tools import cli as commands

from tests.unit.support import Cli
from tests.unit.test_documentation import anchors, without_code

ROOT = Path(__file__).parents[2]
TEXTS = [ROOT / f"{name}.md" for name in ("SECURITY", "CONTRIBUTING", "RELEASING")]
TEXTS += [ROOT / "tests/README.md", ROOT / ".github/pull_request_template.md"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(file for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml")
CONFIG = ROOT / ".github/ISSUE_TEMPLATE/config.yml"
PRE_COMMIT = ROOT / ".pre-commit-config.yaml"
CONTAINER = ROOT / ".devcontainer/devcontainer.json"
OTHERS = [CONFIG, PRE_COMMIT, CONTAINER, ROOT / ".github/CODEOWNERS", ROOT / "tests/unit/slow.txt"]
ALL = [*TEXTS, *WORKFLOWS, *FORMS, *OTHERS]
SCHEMAS = {"github-workflows": WORKFLOWS, "github-issue-forms": FORMS, "github-issue-config": [CONFIG]}


def named(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@functools.cache
def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text("utf-8"))


def steps() -> list[dict[str, Any]]:
    return [step for file in WORKFLOWS for job in read(file)["jobs"].values() for step in job["steps"]]


def lines() -> list[str]:
    """Each line that a workflow, a hook or the container runs."""
    found = [line for step in steps() for line in step.get("run", "").splitlines()]
    found += [hook["entry"] for repository in read(PRE_COMMIT)["repos"] for hook in repository["hooks"]]
    return [*found, json.loads(CONTAINER.read_text("utf-8"))["postCreateCommand"]]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_they_fit_their_schema(schema: str) -> None:
    """With the schemas that check-jsonschema brings along: nothing is fetched."""
    files = [str(file) for file in SCHEMAS[schema]]
    assert files
    asked = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_form_that_does_not_fit_is_noticed(tmp_path: Path) -> None:
    broken = tmp_path / "form.yml"
    broken.write_text(FORMS[0].read_text("utf-8").replace("type: textarea", "type: textaera"), "utf-8")
    asked = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-issue-forms", str(broken)]
    assert subprocess.run(asked, capture_output=True).returncode == 1


@pytest.mark.parametrize("form", FORMS, ids=named)
def test_a_form_asks_for_status(form: Path) -> None:
    (asked,) = (field for field in read(form)["body"] if field.get("id") == "status")
    assert "vllm-livepatch status --json" in asked["attributes"]["label"]
    assert asked["validations"]["required"] is True


def test_an_action_is_named_by_a_commit_and_says_its_version() -> None:
    for file in WORKFLOWS:
        uses = re.findall(r"uses: (.*)", file.read_text("utf-8"))
        assert uses
        for one in uses:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", one), one


def test_a_workflow_may_do_no_more_than_it_says() -> None:
    for file in WORKFLOWS:
        assert read(file)["permissions"] == {"contents": "read"}, file
        assert all("timeout-minutes" in job for job in read(file)["jobs"].values()), file


def test_the_two_commands_of_the_readme_are_run() -> None:
    run = {step["run"] for step in steps() if "run" in step}
    assert {"tools/test.sh", "tools/test.sh fast", "tools/demo.sh"} <= run


def test_the_interpreters_are_those_that_the_project_supports() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    jobs = read(ROOT / ".github/workflows/tests.yml")["jobs"]
    (on_path,) = (step["with"]["python-version"] for step in jobs["all"]["steps"] if "with" in step)
    assert sorted(on_path.split()) == sorted(supported)
    # The tools run with those that tools/bootstrap.sh takes: one more recent is served by a bundle all the same.
    assert set(jobs["fast"]["strategy"]["matrix"]["python"]) == set(supported) - {"3.14"}


def test_what_a_line_runs_is_there() -> None:
    for line in lines():
        for name in re.findall(r"(?<![\w/.-])(?:tools|tests|docs)/[\w./-]+", line):
            assert (ROOT / name).is_file(), line
            if re.match(rf"\s*(?:exec )?{re.escape(name)}", line):
                assert os.access(ROOT / name, os.X_OK), name


def test_the_commands_and_options_of_a_line_are_ours(cli: Cli) -> None:
    ours = [line for line in lines() if "-m vllm_livepatch" in line]
    assert len(ours) == 3
    for line in ours:
        command, _, rest = line.partition("-m vllm_livepatch ")[2].partition(" ")
        known = cli(command, "--help").out
        for option in re.findall(r"(?<!\S)--[\w-]+", rest):
            assert option in known, line


def test_what_is_slow_is_a_file_of_unit_tests() -> None:
    """`tools/test.sh fast` leaves it out; a name that is none would leave out nothing."""
    slow = (ROOT / "tests/unit/slow.txt").read_text("utf-8").splitlines()
    assert slow == sorted(set(slow))
    assert [name for name in slow if not (ROOT / "tests/unit" / name).is_file()] == []
    assert len(slow) < len(list((ROOT / "tests/unit").glob("test_*.py")))


def test_who_is_asked_to_review_is_asked_about_what_is_there() -> None:
    patterns = [line.split() for line in (ROOT / ".github/CODEOWNERS").read_text("utf-8").splitlines()]
    for pattern, *owners in (words for words in patterns if words and not words[0].startswith("#")):
        assert pattern == "*" or (ROOT / pattern.strip("/")).exists(), pattern
        assert owners
        assert all(re.fullmatch(r"@[\w-]+/[\w-]+", owner) for owner in owners), owners


@pytest.mark.parametrize("page", TEXTS, ids=named)
def test_its_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text("utf-8"))):
        file, _, heading = target.partition("#")
        assert (page.parent / file).exists(), target
        assert not heading or heading in anchors(page.parent / file), target


@pytest.mark.parametrize("page", TEXTS, ids=named)
def test_its_commands_are_there(page: Path) -> None:
    """Paths and modules in code: of this repository, or what a command makes."""
    text = page.read_text("utf-8")
    code = re.findall(r"```bash\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
    for piece in code:
        for name in re.findall(r"(?<![\w/.-])(?:tools|tests|docs)/[\w./-]*\w", piece):
            assert (ROOT / name).exists() or "NAME" in name, piece
        for module in re.findall(r"-m ((?:vllm_livepatch|tests)[\w.]*)", piece):
            place = ROOT.joinpath(*module.removeprefix("vllm_livepatch.").split("."))
            assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module
        for command in re.findall(r"(?:^|\n)vllm-livepatch ([a-z-]+)", piece):
            assert command in {
                one.name or getattr(one.callback, "__name__", "") for one in commands.app.registered_commands
            }, command


@pytest.mark.parametrize("file", ALL, ids=named)
def test_it_names_no_machine_and_no_registry(file: Path) -> None:
    text = file.read_text("utf-8")
    assert not re.search(r"(?<![\w.$~-])/(tmp|root|home|work|Users|opt)/", text)
    assert not re.search(r"\b(pypi\.org|pythonhosted|ghcr\.io|docker\.io|quay\.io|mcr\.microsoft)\b", text)
