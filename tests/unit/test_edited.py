"""`doctor` names installed files that a recipe edited, and what a diff left beside them."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize import cache, installed
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.tools.in_bundle import doctor, edited, verdicts

from tests.unit.support import Sandbox
from tests.unit.test_doctor import ask

FILE = "fakeengine/scheduler.py"
OK = ("ok", "each file that a patch is for is as it was installed (1 compared with RECORD)")


def record(site: Path, distribution: str = "fakeengine-1.0", algorithm: str = "sha256", without: str = "") -> Path:
    """As pip leaves it: each file of the package with its hash, its own line without one."""
    folder = site / f"{distribution}.dist-info"
    folder.mkdir(exist_ok=True)
    lines = [f"{folder.name}/RECORD,,"]
    for file in sorted((site / "fakeengine").rglob("*.py")):
        name, data = file.relative_to(site).as_posix(), file.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.new(algorithm, data).digest()).decode().rstrip("=")
        lines += [f"{name},{algorithm}={digest},{len(data)}"] if name != without else []
    (folder / "RECORD").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


def edit(site: Path) -> None:
    """A comment: the code's fingerprint stays, so nothing else has anything to say of it."""
    file = site / FILE
    file.write_text(f"# by a recipe\n{file.read_text('utf-8')}", "utf-8")


def line(sandbox: Sandbox) -> tuple[str, str] | None:
    """The result and message of the line, None where there is none. It is never a failure."""
    done = ask(sandbox, "doctor", "--json")
    answer = json.loads(done.out)
    assert (done.code, answer["patched"]) == (0, True)
    found = [(one["result"], one["message"]) for one in answer["checks"] if one["name"] == "edited files"]
    assert len(found) <= 1
    return found[0] if found else None


def test_files_that_are_as_installed(patched: Sandbox) -> None:
    record(patched.site)
    assert line(patched) == OK


def test_an_edited_file_is_named_with_the_patches_that_are_for_its_code(patched: Sandbox) -> None:
    record(patched.site)
    edit(patched.site)
    found = line(patched)
    assert found is not None
    assert found[0] == "warning"
    assert found[1].startswith(f"{FILE} is not as fakeengine 1.0 was installed: a step of a recipe")
    assert "docs/recipes.md" in found[1]
    assert found[1].endswith(" Patches for code in it: around.")


def test_an_edited_file_that_no_patch_is_for_is_not_read(patched: Sandbox) -> None:
    patched.write({"fakeengine/other.py": "one = 1\n"})
    record(patched.site)
    patched.write({"fakeengine/other.py": "one = 2\n", "fakeengine/sub/other.py.rej": ""})
    assert line(patched) == OK


@pytest.mark.parametrize("name", [f"{FILE}.orig", f"{FILE}.rej", "fakeengine/other.py.rej"])
@pytest.mark.parametrize("listed", [True, False], ids=["", "without RECORD"])
def test_what_a_diff_left_is_named(patched: Sandbox, name: str, listed: bool) -> None:
    if listed:
        record(patched.site)
    patched.write({name: ""})
    found = line(patched)
    assert found is not None
    assert found[0] == "warning"
    assert found[1].startswith(f"{name} was left by a diff: a step of a recipe")
    assert "Patches for code" not in found[1]


def test_a_file_that_the_distribution_did_not_bring(patched: Sandbox) -> None:
    record(patched.site, without=FILE)
    found = line(patched)
    assert found is not None
    assert found[1].startswith(f"{FILE} is not as fakeengine 1.0 was installed: ")


def test_where_nothing_is_known_nothing_is_said(patched: Sandbox) -> None:
    edit(patched.site)
    assert line(patched) is None  # no distribution at all
    folder = record(patched.site, algorithm="sha512")
    edit(patched.site)
    assert line(patched) == OK
    (folder / "RECORD").write_bytes(b"fakeengine/__init__.py,\xff\n")
    assert line(patched) is None
    (folder / "RECORD").write_text("_editable_fakeengine.pth,,\nelse/fakeengine/__init__.py,,\n")
    assert line(patched) is None
    (folder / "RECORD").unlink()
    assert line(patched) is None


def test_a_vendors_distribution_and_two_of_one_package(patched: Sandbox) -> None:
    """A file counts as edited where no distribution brought it as it is."""
    record(patched.site, "rocm_build-7")
    edit(patched.site)
    found = line(patched)
    assert found is not None
    assert " is not as rocm_build 7 was installed: " in found[1]
    record(patched.site, "fakeengine_rocm-2.0")
    assert line(patched) == OK
    edit(patched.site)
    record(patched.site, "fakeengine-1.0")
    assert line(patched) == OK


def test_many_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"fakeengine/m{number}.py" for number in range(5)]
    for name in ("fakeengine/__init__.py", *names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def f(): pass\n")
    record(tmp_path)
    for name in names:
        (tmp_path / name).write_text("def f(): return 1\n")
        (tmp_path / f"{name}.orig").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    facts = {"title": "one", "package": "fakeengine", "variant": []}
    patches = [to_patch(f"p{number}", {**facts, "targets": [f"fakeengine.m{number}:f"]}) for number in range(5)]
    text = edited.look(patches).text
    assert text.startswith(f"{', '.join(names[:3])} and 2 more is not as fakeengine 1.0 was installed; ")
    assert f"{', '.join(f'{name}.orig' for name in names[:3])} and 2 more was left by a diff: " in text
    assert text.endswith("Patches for code in it: p0, p1, p2, p3, p4.")


def test_a_file_system_that_does_not_answer_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(cache, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(cache, "_silent", [])
    monkeypatch.setattr(installed.Process, "places", lambda self, package: answered.wait() and ())
    patch = to_patch("one", {"title": "one", "package": "fakeengine", "targets": ["fakeengine.m:f"], "variant": []})
    try:
        ((result, message),) = doctor._edited(verdicts.Catalogue("1", (patch,), {}))
    finally:
        answered.set()
    assert result == "warning"
    assert "does not answer" in message
