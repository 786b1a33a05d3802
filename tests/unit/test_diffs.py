"""`from-diff`: what a diff may be, what it may not, and what is written of it."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from vllm_livepatch.sitecustomize.changes import changed
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.commands import from_diff
from vllm_livepatch.tools.compatibility import imports
from vllm_livepatch.tools.diffs import judging, reading
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import registry, sources
from vllm_livepatch.tools.toml import tomllib

from tests.unit.support import finish

OLD = "import os\n\n\ndef work(item):\n    return [item]\n\n\ndef rest():\n    return os.sep\n"
NEW = OLD.replace("[item]", "[item, item]")
BODY = " def work(item):\n-    return [item]\n+    return [item, item]\n \n"
HUNK = "@@ -4,3 +4,3 @@ import os\n" + BODY
PLAIN = f"--- a/vllm/worker.py\n+++ b/vllm/worker.py\n{HUNK}"
GIT = f"diff --git a/vllm/worker.py b/vllm/worker.py\nindex 1234567..89abcde 100644\n{PLAIN}"
MAIL = f"""\
From 0123456789abcdef0123456789abcdef01234567 Mon Sep 17 00:00:00 2001
From: Somebody <somebody@example.com>
Date: Mon, 1 Jan 2026 00:00:00 +0000
Subject: [PATCH] Work twice

It is said that @@ in a message is no hunk, and that
 + 1 is no addition.
---
 vllm/worker.py | 2 +-
 1 file changed, 1 insertion(+), 1 deletion(-)

{GIT}--\x20
2.43.0

"""
ADDED = """\
diff --git a/vllm/extra/__init__.py b/vllm/extra/__init__.py
new file mode 100644
index 0000000..e69de29
diff --git a/vllm/extra/more.py b/vllm/extra/more.py
new file mode 100644
index 0000000..89abcde
--- /dev/null
+++ b/vllm/extra/more.py
@@ -0,0 +1,2 @@
+def more():
+    return "more"
"""
RENAMED = """\
diff --git a/vllm/old.py b/vllm/new.py
similarity index 90%
rename from vllm/old.py
rename to vllm/new.py
--- a/vllm/old.py
+++ b/vllm/new.py
@@ -1 +1 @@
-x = 1
+x = 2
"""
DELETED = """\
diff --git a/vllm/old.py b/vllm/old.py
deleted file mode 100644
--- a/vllm/old.py
+++ /dev/null
@@ -1 +0,0 @@
-x = 1
"""
MODE = "diff --git a/vllm/tool.py b/vllm/tool.py\nold mode 100644\nnew mode 100755\n"
BINARY = """\
diff --git a/docs/picture.png b/docs/picture.png
index 1234567..89abcde 100644
GIT binary patch
literal 4
LcmZQz00jU5

"""
TESTS = PLAIN.replace("vllm/worker.py", "tests/test_worker.py")
KERNEL = PLAIN.replace("vllm/worker.py", "csrc/kernel.cu")
LMCACHE = PLAIN.replace("vllm/worker.py", "lmcache/worker.py")
EMPTIED = "--- a/vllm/worker.py\n+++ b/vllm/worker.py\n@@ -1,2 +0,0 @@\n-x = 1\n-y = 2\n"


def source_of(texts: Mapping[str, str]) -> imports.Source:
    return dict(texts).get


def judge(text: str, texts: Mapping[str, str], modules: judging.Modules | None = None) -> judging.Judged:
    return judging.judge(reading.parse(text.encode()), "1.0", source_of(texts), modules)


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        GIT,
        MAIL,
        PLAIN + "\n\n",
        PLAIN.replace("\n \n", "\n\n"),  # a mailer that strips spaces from line ends
        PLAIN.replace("worker.py\n", "worker.py\t2026-01-01 10:00:00.000000000 +0000\n", 2),
        PLAIN.replace("a/", "").replace("b/", ""),  # diff.noprefix
        PLAIN.replace("a/", "i/").replace("b/", "w/"),  # diff.mnemonicPrefix
        PLAIN.replace("a/", "vllm-1.0/").replace("b/", "vllm-mine/"),  # diff -ru vllm-1.0 vllm-mine
        PLAIN.replace("a/vllm", "vllm/vllm").replace("b/vllm", "vllm/vllm"),
        "Index: vllm/worker.py\n" + "=" * 67 + "\n" + PLAIN,
    ],
)
def test_the_forms_of_a_diff(text: str) -> None:
    diff = reading.parse(text.encode())
    assert [change.module for change in diff.changes] == ["vllm.worker"]
    assert (diff.package, diff.aside) == ("vllm", ())
    assert changed(OLD, diff.changes[0].hunks) == NEW
    assert reading.parse(diff.text.encode()).changes == diff.changes, "what is kept means the same"


def test_several_files_and_what_is_set_aside() -> None:
    diff = reading.parse((TESTS + GIT + ADDED + GIT.replace("worker", "a")).encode())
    assert [change.module for change in diff.changes] == ["vllm.a", "vllm.extra", "vllm.extra.more", "vllm.worker"]
    assert [change.added for change in diff.changes] == [False, True, True, False]
    assert [change.package for change in diff.changes] == [False, True, False, False]
    assert diff.changes[1].text == ""
    assert diff.changes[2].text == 'def more():\n    return "more"\n'
    assert diff.aside == (("tests/test_worker.py", "no Python module of vllm or lmcache"),)
    assert "tests/" not in diff.text
    assert reading.parse(diff.text.encode()).changes == diff.changes


def test_a_file_that_plain_diff_adds() -> None:
    text = PLAIN + (
        "--- vllm-1.0/vllm/more.py\t1970-01-01 00:00:00.000000000 +0000\n"
        "+++ vllm-mine/vllm/more.py\t2026-01-01 00:00:00.000000000 +0000\n@@ -0,0 +1 @@\n+x = 1\n"
    )
    assert [(change.module, change.added) for change in reading.parse(text.encode()).changes] == [
        ("vllm.more", True),
        ("vllm.worker", False),
    ]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"include": ["vllm/*"]}, ["vllm.worker"]),
        ({"exclude": ["lmcache/*", "csrc/*", "vllm/old.py", "vllm/tool.py", "docs/*"]}, ["vllm.worker"]),
        ({"include": ["lmcache/w*.py"]}, ["lmcache.worker"]),
    ],
)
def test_files_are_chosen_by_pattern(options: dict[str, list[str]], kept: list[str]) -> None:
    text = GIT + LMCACHE + (KERNEL + BINARY + DELETED + RENAMED + MODE if "exclude" in options else TESTS)
    if "exclude" in options:
        text = text.replace(RENAMED, "")
    diff = reading.parse(text.encode(), **options)
    assert [change.module for change in diff.changes] == kept
    assert {why for _, why in diff.aside} <= {"not included", "excluded"}


def test_a_rename_is_set_aside_by_either_name() -> None:
    for name in ("vllm/old.py", "vllm/new.py"):
        assert reading.parse((GIT + RENAMED).encode(), exclude=[name]).aside == (("vllm/new.py", "excluded"),)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "blank": (b"\n \n\t\n", "is empty"),
    "prose": (b"There is no diff in here.\n", "not a unified diff"),
    "python": (OLD.encode(), "not a unified diff"),
    "absolute": (PLAIN.replace("a/vllm", "/usr/lib/vllm").replace("b/vllm", "/usr/lib/vllm").encode(), "outside"),
    "absolute new": (PLAIN.replace("b/vllm", "/etc/vllm").encode(), "outside the package"),
    "parent": (PLAIN.replace("vllm/", "vllm/../../").encode(), "outside the package"),
    "parent in git": (GIT.replace("/vllm/", "/../vllm/").encode(), "outside the package"),
    "parent of something set aside": ((PLAIN + TESTS.replace("tests/", "../")).encode(), "outside the package"),
    "nowhere": (b"--- /dev/null\n+++ /dev/null\n@@ -0,0 +1 @@\n+x\n", "without a name"),
    "no names": (b"--- \n+++ \n" + HUNK.encode(), "outside the package"),
    "binary": ((GIT + BINARY).encode(), "docs/picture.png is changed in binary form"),
    "binary, not shown": ((GIT + "Binary files a/vllm/x.so and b/vllm/x.so differ\n").encode(), "binary form"),
    "zero bytes": (PLAIN.replace("[item]", "\0").encode(), "binary parts"),
    "CRLF": (PLAIN.replace("\n", "\r\n").encode(), "CRLF"),
    "one CR": (PLAIN.replace("[item]", "[item]\r").encode(), "CR characters"),
    "cut off": (PLAIN.encode()[:-1], "does not end with a newline"),
    "no newline at the end": (
        (PLAIN.removesuffix(" \n") + "\\ No newline at end of file\n").replace("-4,3 +4,3", "-4,2 +4,2").encode(),
        "vllm/worker.py: a file that does not end with a newline",
    ),
    "count too large": (PLAIN.replace("-4,3", "-4,30").encode(), "shorter than expected"),
    "count too small": (PLAIN.replace("-4,3 +4,3", "-4,2 +4,2").encode(), "line 7 of the diff is beyond"),
    "count far too small": (PLAIN.replace("-4,3 +4,3", "-4,1 +4,1").encode(), "line 5 of the diff is beyond"),
    "count of new lines wrong": (PLAIN.replace("+4,3", "+4,1").encode(), "longer than expected"),
    "counts of letters": (PLAIN.replace("-4,3", "-four,3").encode(), "1 hunk headers, of which 0"),
    "one header of two": ((PLAIN + HUNK.replace("@@ -4,3", "@@ 4,3")).encode(), "2 hunk headers, of which 1"),
    "combined": ((PLAIN + HUNK.replace("@@ -4,3", "@@@ -4,3 -4,3")).encode(), "2 hunk headers, of which 1"),
    "huge line number": (PLAIN.replace("-4,3", f"-{'9' * 5000},3").encode(), "cannot be read"),
    "not UTF-8": (PLAIN.replace("[item]", "ä").encode("latin-1"), "not UTF-8: byte 97"),
    "UTF-16": (PLAIN.encode("utf-16"), "binary parts"),
    "too large": (PLAIN.encode() + b"+" * reading.LARGEST, "more than 8 MiB"),
    "hunk without file": (HUNK.encode(), "cannot be read"),
    "new name only": (PLAIN.split("\n", 1)[1].encode(), "cannot be read"),
    "file twice": ((GIT + GIT).encode(), "names vllm/worker.py twice"),
    "address": (b"diff --git " + b"://" * 1000 + b" x\n", "line 1 of the diff names no file"),
    "endless name": (b"diff --git a/" + b"x" * 10000 + b" b/x\n", "line 1 of the diff names no file"),
    "compiled": ((GIT + KERNEL).encode(), r"csrc/kernel.cu is compiled source"),
    "deleted": ((GIT + DELETED).encode(), "vllm/old.py is deleted"),
    "renamed": ((GIT + RENAMED).encode(), "vllm/old.py is renamed"),
    "moved in": (RENAMED.replace("vllm/old", "tools/old").encode(), "tools/old.py is renamed"),
    "mode": ((GIT + MODE).encode(), "vllm/tool.py is named in the diff but not changed"),
    "no name of a module": (PLAIN.replace("worker.py", "wor-ker.py").encode(), "no module's name"),
    "spaces in a name": (PLAIN.replace("worker.py", "wor ker.py").encode(), "no module's name"),
    "tests only": (TESTS.encode(), "changes no Python module"),
    "both packages": ((GIT + LMCACHE).encode(), "changes lmcache and vllm: make a patch for each"),
    "only adds": (ADDED.encode(), "only adds modules"),
    "added with old lines": (
        ADDED.replace("@@ -0,0 +1,2", "@@ -1,1 +1,3").replace("+def", " old\n+def").encode(),
        "old",
    ),
    "module and package": (
        (PLAIN + PLAIN.replace("worker.py", "worker/__init__.py")).encode(),
        "both a module and a package vllm.worker",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_and_broken_diffs(case: str, tmp_path: Path) -> None:
    data, message = HOSTILE[case]
    with pytest.raises(UserError, match=message) as raised:
        from_diff.make(data, "mine", tmp_path / "out")
    assert len(str(raised.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["empty", "absolute", "binary", "CRLF", "count too large", "not UTF-8", "compiled"])
def test_the_command_says_one_line_and_writes_nothing(case: str, tmp_path: Path) -> None:
    (tmp_path / "bad.diff").write_bytes(HOSTILE[case][0])
    refused(tmp_path, "bad.diff", HOSTILE[case][1])


def test_fifty_megabytes(tmp_path: Path) -> None:
    with (tmp_path / "bad.diff").open("wb") as file:
        file.write(PLAIN.encode())
        for _ in range(50):
            file.write(b"+" * 1024 * 1024)
    refused(tmp_path, "bad.diff", "more than 8 MiB")


@pytest.mark.parametrize(("file", "message"), [("none.diff", "cannot be read: No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read(file: str, message: str, tmp_path: Path) -> None:
    refused(tmp_path, file, message)


@pytest.mark.parametrize("name", ["", "Mine", "my__patch", "-mine", "mine-", "../mine", "a b", "1st", "ä"])
def test_names_that_a_patch_cannot_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no patch name"):
        from_diff.make(PLAIN.encode(), name, tmp_path)


def refused(place: Path, file: str, message: str) -> None:
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", "from-diff", file, "--name", "mine", "--out", "out"]
    done = finish(command, {"HOME": str(place), "LC_ALL": "C.UTF-8"}, cwd=place)
    assert (done.code, done.out) == (2, "")
    assert len(done.lines) == 1
    assert done.err.startswith("vllm-livepatch: ")
    assert message.partition(": byte")[0] in done.err
    assert not (place / "out").exists()


MUTATIONS = st.lists(
    st.tuples(st.sampled_from(["drop", "double", "swap", "put"]), st.integers(0, 60), st.text(max_size=12)), max_size=6
)
WHOLE = (MAIL + ADDED + LMCACHE.replace("lmcache", "vllm/sub") + TESTS).splitlines(keepends=True)


def accepted_or_refused(data: bytes) -> None:
    """A diff is either taken, and then names modules of one package only and is kept in the same meaning, or refused
    with one line."""
    try:
        diff = reading.parse(data)
    except UserError:
        return
    for change in diff.changes:
        assert change.module.split(".")[0] == diff.package
        assert all(part.isidentifier() for part in change.module.split("."))
        assert all("\n" not in line for hunk in change.hunks for line in (*hunk.old, *hunk.new))
    assert reading.parse(diff.text.encode()).changes == diff.changes


@given(st.binary(max_size=300))
def test_any_bytes_are_taken_or_refused(data: bytes) -> None:
    accepted_or_refused(data + b"\n")


@settings(max_examples=400)
@given(MUTATIONS)
def test_a_mutated_diff_is_taken_or_refused(mutations: list[tuple[str, int, str]]) -> None:
    lines = list(WHOLE)
    for kind, at, text in mutations:
        at %= len(lines)
        if kind == "drop":
            del lines[at : at + 1 + len(text)]
        elif kind == "double":
            lines.insert(at, lines[at])
        elif kind == "swap":
            lines[at], lines[-1 - at] = lines[-1 - at], lines[at]
        else:
            line = lines[at]
            lines[at] = line[: len(text)] + text + line[len(text) :]
        lines = lines or ["\n"]
    accepted_or_refused("".join(lines).encode("utf-8", "replace"))


@settings(max_examples=300)
@given(st.lists(st.sampled_from([*WHOLE, "@@ -1 +1 @@\n", "+\n", "-\n", " \n", "\n", "\\ No newline\n"]), max_size=30))
def test_shuffled_lines_are_taken_or_refused(lines: list[str]) -> None:
    accepted_or_refused("".join(lines).encode())


def test_it_applies_exactly() -> None:
    judged = judge(PLAIN, {"vllm.worker": OLD})
    assert (judged.verdict, judged.detail) == ("needed", "")
    assert list(judged.code) == ["vllm.worker"]


def test_moved_lines_are_fine_and_named() -> None:
    judged = judge(PLAIN, {"vllm.worker": "# moved\n" * 7 + OLD})
    assert (judged.verdict, judged.detail) == ("needed", "hunks moved by up to 7 lines")


def test_it_is_contained_already() -> None:
    texts = {"vllm.worker": NEW, "vllm.extra": "", "vllm.extra.more": 'def more():\n    return "more"\n'}
    judged = judge(GIT + ADDED, texts)
    assert (judged.verdict, list(judged.code)) == ("fixed-upstream", ["vllm.worker"])
    assert judge(GIT + ADDED, {**texts, "vllm.extra.more": "# other\n"}).verdict == "drifted"


@pytest.mark.parametrize(
    ("texts", "detail"),
    [
        ({}, "there is no vllm.worker"),
        ({"vllm.worker": OLD.replace("[item]", "item")}, r"vllm.worker: hunk 1 \(line 4\) finds its lines nowhere"),
        ({"vllm.worker": "\n" + OLD + OLD}, "finds its lines in 2 places: lines 5, 14"),
        ({"vllm.worker": OLD, "vllm.extra.more": "x = 1\n"}, "vllm.extra.more exists already"),
        ({"vllm.worker": OLD}, "vllm.extra is added, but not its package"),
    ],
)
def test_it_does_not_apply(texts: dict[str, str], detail: str) -> None:
    judged = judge(GIT + ADDED, {"vllm": "", **texts} if "its package" not in detail else texts)
    assert (judged.verdict, judged.code) == ("drifted", {})
    assert re.search(detail, judged.detail)


def test_what_it_makes_must_be_python() -> None:
    judged = judge(PLAIN.replace("[item, item]", "[item, item"), {"vllm.worker": OLD})
    assert judged.verdict == "drifted"
    assert "vllm.worker, changed, is not Python" in judged.detail


NEEDS = """\
--- a/vllm/sub/__init__.py
+++ b/vllm/sub/__init__.py
@@ -1,2 +1,3 @@
 x = 1
+{line}
 y = 2
"""
THERE = {
    "vllm": "",
    "vllm.sub": "x = 1\ny = 2\n",
    "vllm.sub.near": "def here():\n    pass\n\n\nfor i in (1,):\n    j = i\n",
    "vllm.far": "if 1:\n    import os as there\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    seen = 1\n",
    "vllm.lazy": "def __getattr__(name):\n    return {'anything': 1}[name]\n",
}


@pytest.mark.parametrize(
    ("line", "lacking"),
    [
        ("from . import near", ""),
        ("from .near import here, i, j", ""),
        ("from ..far import there", ""),
        ("from vllm.sub import near, x", ""),
        ("from vllm.lazy import anything", ""),
        ("import vllm.sub.near, os.nowhere", ""),
        ("from elsewhere import anything", ""),
        ("from .near import gone", "vllm.sub.near:gone"),
        ("from vllm.lazy import any", "vllm.lazy:any"),
        ("from .gone import name", "vllm.sub.gone:name"),
        ("from . import gone", "vllm.sub:gone"),
        ("from .. import gone", "vllm:gone"),
        ("from vllm.far import seen", "vllm.far:seen"),
        ("import vllm.gone", "vllm.gone"),
        ("def later(): from vllm.far import gone", "vllm.far:gone"),
        ("try: from vllm.far import gone\n+except ImportError: gone = None", ""),
        ("with suppress(ImportError): import vllm._C", ""),
        ("if TYPE_CHECKING: from vllm.far import gone", ""),
    ],
)
def test_what_it_newly_imports_must_be_there(line: str, lacking: str) -> None:
    text = NEEDS.format(line=line).replace("+1,3", f"+1,{3 + line.count(chr(10))}")
    judged = judge(text, THERE)
    assert judged.verdict == ("drifted" if lacking else "needed")
    assert judged.detail == (f"applied, it imports what is not there: {lacking}" if lacking else "")


def test_what_it_imported_before_is_not_asked_for() -> None:
    judged = judge(NEEDS.format(line="z = 1"), {"vllm.sub": "x = 1\ny = 2\nfrom vllm._C import compiled\n"})
    assert judged.verdict == "needed"


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        ("from vllm.worker import rest\n", True),
        ("from .worker import rest as r\n", True),
        ("def f():\n    from vllm.worker import work, rest\n", True),
        ("from vllm.worker import work\n", False),
        ("rest = 1\n", False),
    ],
)
def test_what_it_takes_away_must_be_imported_by_none(other: str, taken: bool) -> None:
    text = "--- a/vllm/worker.py\n+++ b/vllm/worker.py\n@@ -7,3 +7,1 @@\n \n-def rest():\n-    return os.sep\n"
    judged = judge(text, {"vllm.worker": OLD}, lambda: [("vllm.other", False, other)])
    assert judged.verdict == ("drifted" if taken else "needed")
    if taken:
        assert judged.detail == "it takes away what others import: vllm.worker:rest (by vllm.other)"


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stands in for the registry: releases of a package with one module `worker`; None where a release is not there."""

    def there(**texts: str | None) -> None:
        pins = tuple(registry.Pin("vllm", name.replace("_", ".")[1:], "", "", "") for name in texts)
        for name, text in texts.items():
            if text is not None:
                module = tmp_path / "releases" / name.replace("_", ".")[1:] / "vllm" / "worker.py"
                module.parent.mkdir(parents=True)
                module.write_text(text, "utf-8")

        def site_packages(package: str, version: str) -> Path:
            place = tmp_path / "releases" / version
            if not place.is_dir():
                raise sources.SourcesError(f"{package} {version} is not in the registry")
            return place

        monkeypatch.setattr(registry, "all_pins", lambda package: pins)
        monkeypatch.setattr(sources, "site_packages", site_packages)

    return there


def test_a_diff_becomes_a_patch(tmp_path: Path, releases: Callable[..., None]) -> None:
    releases(v1_0="x = 1\n", v1_1=OLD, v1_2=f"# moved\n{OLD}", v1_3=f"{OLD}\n\ny = 1\n", v1_4=NEW, v1_5=None)
    outcome = from_diff.make((TESTS + MAIL).encode(), "work-twice", tmp_path / "mine", origin="vllm#1")
    assert [item.verdict for item in outcome.judged] == ["drifted", "needed", "needed", "needed", "fixed-upstream"]
    assert outcome.unread == (("1.5", "vllm 1.5 is not in the registry"),)
    folder = tmp_path / "mine" / "work_twice"
    assert outcome.folder == folder
    assert sorted(path.name for path in folder.iterdir()) == ["change.diff", "patch.lock", "patch.toml"]
    entry = catalogue.load([tmp_path / "mine"])["work-twice"]
    assert entry.patch.targets == ("vllm.worker",)
    assert (entry.patch.diff, entry.patch.traced, entry.patch.added) == ("change.diff", True, ())
    assert [(variant.releases, variant.verdict) for variant in entry.patch.variants] == [
        (("1.1", "1.2"), "needed"),  # a comment is no other code
        (("1.3",), "needed"),
        (("1.4",), "fixed-upstream"),
    ]
    assert entry.patch.about["origin"] == "vllm#1"
    assert entry.patch.about["set_aside"] == ["tests/test_worker.py: no Python module of vllm or lmcache"]
    assert entry.patch.about["drifted"] == ["1.0: vllm.worker: hunk 1 (line 4) finds its lines nowhere"]
    assert [change.module for change in entry.changes()] == ["vllm.worker"]


def test_a_diff_that_applies_to_nothing_is_not_written(tmp_path: Path, releases: Callable[..., None]) -> None:
    releases(v1_0="x = 1\n", v1_1=NEW)
    outcome = from_diff.make(PLAIN.encode(), "work-twice", tmp_path / "mine")
    assert [item.verdict for item in outcome.judged] == ["drifted", "fixed-upstream"]
    assert outcome.folder is None
    assert not (tmp_path / "mine").exists()


def test_no_release_can_be_read(tmp_path: Path, releases: Callable[..., None]) -> None:
    releases(v1_0=None)
    with pytest.raises(UserError, match=r"no release of vllm can be read: vllm 1\.0 is not"):
        from_diff.make(PLAIN.encode(), "work-twice", tmp_path / "mine")


def test_a_folder_that_was_not_made_of_a_diff_is_left_alone(tmp_path: Path, releases: Callable[..., None]) -> None:
    releases(v1_0=OLD)
    (tmp_path / "work_twice").mkdir()
    (tmp_path / "work_twice" / "patch.toml").write_text("mine")
    with pytest.raises(UserError, match="work_twice exists already, and was not made of a diff"):
        from_diff.make(PLAIN.encode(), "work-twice", tmp_path)
    assert [path.name for path in (tmp_path / "work_twice").iterdir()] == ["patch.toml"]


def listed(folder: Path) -> list[tuple[tuple[str, ...], str]]:
    (entry,) = catalogue.load([folder]).keys() - catalogue.load().keys()
    variants = catalogue.load([folder])[entry].patch.variants
    return [(variant.releases, variant.verdict) for variant in variants]


def installed_release(site_packages: Path, version: str, text: str) -> Path:
    """A site-packages directory with a vLLM of one module `worker`."""
    (site_packages / "vllm").mkdir(parents=True)
    (site_packages / "vllm" / "worker.py").write_text(text, "utf-8")
    (site_packages / "vllm" / "_version.py").write_text(f"__version__ = {version!r}\n", "utf-8")
    (site_packages / "vllm" / "__init__.py").write_text("")
    return site_packages


def test_it_is_judged_on_one_release_and_on_what_is_installed(tmp_path: Path, releases: Callable[..., None]) -> None:
    releases(v1_0=OLD, v1_1=f"{OLD}\n\ny = 1\n", v1_2=NEW)
    mine = tmp_path / "mine"
    from_diff.make(PLAIN.encode(), "work-twice", mine, releases=["vllm==1.1"])
    assert listed(mine) == [(("1.1",), "needed")]
    nightly = installed_release(tmp_path / "nightly", "1.3.dev7+gabc", f"{OLD}\n\nz = 1\n")
    outcome = from_diff.make(PLAIN.encode(), "work-twice", mine, site_packages=nightly)
    assert [(item.release, item.verdict) for item in outcome.judged] == [("1.3.dev7+gabc", "needed")]
    assert listed(mine) == [(("1.1",), "needed"), (("1.3.dev7+gabc",), "needed")]
    with pytest.raises(UserError, match=r"vllm 1\.9 is not pinned: name where it is installed"):
        from_diff.make(PLAIN.encode(), "work-twice", mine, releases=["1.9"])
    with pytest.raises(UserError, match="has no vllm that says which release it is"):
        from_diff.make(PLAIN.encode(), "work-twice", mine, site_packages=tmp_path / "releases")


def test_a_folder_is_made_anew_and_keeps_what_a_person_wrote(tmp_path: Path, releases: Callable[..., None]) -> None:
    releases(v1_0="x = 1\n", v1_1=OLD, v1_2=NEW)
    from_diff.make(PLAIN.encode(), "work-twice", tmp_path / "mine", origin="vllm#1")
    file = tmp_path / "mine" / "work_twice" / "patch.toml"
    said = tomllib.loads(file.read_text("utf-8"))
    said |= {"title": "Mine", "traced": False, "must": True, "about": {**said["about"], "symptom": "It works once"}}
    file.write_text(tomli_w.dumps(said), "utf-8")
    from_diff.make(PLAIN.encode(), "work-twice", tmp_path / "mine", origin="vllm#2", releases=["1.1"])
    assert tomllib.loads(file.read_text("utf-8")) == said  # also of what was not judged again
    assert listed(tmp_path / "mine") == [(("1.1",), "needed"), (("1.2",), "fixed-upstream")]
    other = PLAIN.replace("[item, item]", "[item, item, item]")
    from_diff.make(other.encode(), "work-twice", tmp_path / "mine", releases=["1.1"])
    assert listed(tmp_path / "mine") == [(("1.1",), "needed")]  # the others were judged for another diff
    assert tomllib.loads(file.read_text("utf-8"))["title"] == "Mine"


def test_a_release_that_has_it_in_another_form(tmp_path: Path, releases: Callable[..., None]) -> None:
    releases(v1_0=OLD, v1_1=OLD.replace("[item]", "list((item, item))"), v1_2=None)
    mine = tmp_path / "mine"
    from_diff.make(PLAIN.encode(), "work-twice", mine)
    assert listed(mine) == [(("1.0",), "needed")]
    assert "variant" not in tomllib.loads((mine / "work_twice" / "patch.toml").read_text("utf-8")), "nothing in the way"
    outcome = from_diff.make(PLAIN.encode(), "work-twice", mine, releases=["1.0"], fixed=["vllm==1.1"])
    assert [(item.release, item.verdict) for item in outcome.judged] == [("1.0", "needed"), ("1.1", "fixed-upstream")]
    assert listed(mine) == [(("1.0",), "needed"), (("1.1",), "fixed-upstream")]
    from_diff.make(PLAIN.encode(), "work-twice", mine, releases=["1.0"])
    assert listed(mine) == [(("1.0",), "needed"), (("1.1",), "fixed-upstream")], "what was said of it stays"
    with pytest.raises(UserError, match=r"--fixed-upstream 9: no such release of vllm was judged|vllm 9 is not pinned"):
        from_diff.make(PLAIN.encode(), "work-twice", mine, fixed=["9"])


def test_two_releases_alone_are_no_range(tmp_path: Path, releases: Callable[..., None]) -> None:
    releases(v1_0=OLD, v1_1=None)
    nightly = installed_release(tmp_path / "nightly", "0.9.dev7+gabc", OLD)
    made = from_diff.make(PLAIN.encode(), "work-twice", tmp_path / "mine", releases=["1.0"], site_packages=nightly)
    text = io.StringIO()
    from_diff.show(made, Console(file=text, width=200))
    assert text.getvalue().splitlines()[1].startswith("vllm 0.9.dev7+gabc, 1.0  applies")


def test_the_table_calls_no_release_needed(tmp_path: Path, releases: Callable[..., None]) -> None:
    releases(v1_0=OLD, v1_1=NEW)
    text = io.StringIO()
    from_diff.show(from_diff.make(PLAIN.encode(), "work-twice", tmp_path / "mine"), Console(file=text, width=200))
    rows = [line.split()[:3] for line in text.getvalue().splitlines()[1:3]]
    assert rows == [["vllm", "1.0", "applies"], ["vllm", "1.1", "fixed-upstream"]]


def test_a_place_that_cannot_be_written(tmp_path: Path, releases: Callable[..., None]) -> None:
    releases(v1_0=OLD)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        from_diff.make(PLAIN.encode(), "work-twice", tmp_path / "file" / "mine")


def test_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.diff").write_bytes(PLAIN.encode())
    with (tmp_path / "a.diff").open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert from_diff.read("-") == PLAIN.encode()
