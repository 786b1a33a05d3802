"""The project's own command line, of an earlier revision: here of a repository of a few lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import revisions

CLI = """from importlib import metadata
from vllm_livepatch import patches, sitecustomize
print({word!r}, metadata.version("vllm-livepatch"), patches.WORD, sitecustomize.WORD)
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits, of which the first has the tag `old`; and an empty cache."""
    root = tmp_path / "repository"
    for folder in ("patches", "sitecustomize", "tools"):
        (root / folder).mkdir(parents=True)
    git(root, "init", "--quiet")
    for word, version in (("first", "7.1"), ("second", "7.2")):
        for folder in ("patches", "sitecustomize"):
            (root / folder / "__init__.py").write_text(f"WORD = {word!r}\n")
        (root / "tools" / "__init__.py").write_text("")
        (root / "tools" / "cli.py").write_text(CLI.format(word=word))
        (root / "pyproject.toml").write_text(f'[project]\nname = "vllm-livepatch"\nversion = "{version}"\n')
        git(root, "add", ".")
        git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", word)
        if word == "first":
            git(root, "tag", "old")
    monkeypatch.setattr(revisions, "ROOT", root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("revision", "message"), [("old", "first 7.1"), ("HEAD", "second 7.2"), ("HEAD~1", "first 7.1")]
)
@pytest.mark.parametrize("safe_path", ["", "1"])
def test_a_revisions_command_line_is_that_of_all_its_packages(
    repository: Path, revision: str, message: str, safe_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", safe_path)
    word = message.partition(" ")[0]
    assert revisions.command_line(path=revisions.checkout(revision)) == f"{message} {word} {word}\n"


def test_it_is_kept_by_its_commit(repository: Path) -> None:
    kept = revisions.checkout("old")
    assert revisions.checkout("HEAD~1") == kept != revisions.checkout("HEAD")
    (kept / "mark").write_text("")
    assert (revisions.checkout("old") / "mark").exists()


@pytest.mark.parametrize("revision", ["nothing", "--all", ""])
def test_what_is_no_revision_is_an_error_that_names_it(repository: Path, revision: str) -> None:
    with pytest.raises(UserError, match=f"^{revision} is no revision of .*git fetch --unshallow"):
        revisions.checkout(revision)


def test_a_failure_is_shown(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (repository / "tools" / "cli.py").write_text("raise SystemExit('a reason')")
    git(repository, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-a", "-m", "third")
    with pytest.raises(subprocess.CalledProcessError):
        revisions.command_line(path=revisions.checkout("HEAD"))
    assert "a reason" in capfd.readouterr().err
