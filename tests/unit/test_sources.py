"""Sources out of published wheels: only what is wanted, complete or not at all."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vllm_livepatch.tools.releases import registry, sources
from vllm_livepatch.tools.releases.registry import Pin
from vllm_livepatch.tools.releases.sources import SourcesError
from vllm_livepatch.tools.toml import tomllib

from tests.unit.local_index import BINARY, LocalIndex, make_wheel, serving

NAME = "demo-1.0-py3-none-any.whl"
FILES = {
    "demo/__init__.py": b"",
    "demo/big.py": b"x = 1\n" * 10_000,
    "demo/deep/one.py": b"ONE = 1\n",
    "demo/table.json": b"{}",
    "other/stray.py": b"",
}
PYTHON = {name: content for name, content in FILES.items() if name.startswith("demo/") and name.endswith(".py")}


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalIndex]:
    """A local index that offers demo 1.0, which is not pinned; the user's cache is empty."""
    with serving(LocalIndex()) as index:
        index.add("demo", NAME, make_wheel("demo", "1.0", FILES))
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(registry, "all_pins", lambda package: ())
        yield index


def pin_as(monkeypatch: pytest.MonkeyPatch, index: LocalIndex, sources_sha256: str) -> None:
    """Pin demo 1.0 with its own wheel and the given digest of its sources."""
    sha256 = index.add("demo", NAME, index.files["demo"][NAME])
    pins = (Pin("demo", "1.0", NAME, sha256, sources_sha256),)
    monkeypatch.setattr(registry, "all_pins", lambda package: pins)


def contents(directory: Path) -> dict[str, bytes]:
    """Return all files below a directory by their relative names."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def refusal() -> str:
    """Return the message with which fetching fails: one line, without the index's password, the cache left clean."""
    with pytest.raises(SourcesError) as caught:
        sources.site_packages("demo", "1.0")
    message = str(caught.value)
    assert "\n" not in message
    assert "secret" not in message
    cache = sources.cache_directory()
    assert not cache.is_dir() or list(cache.iterdir()) == []
    return message


def test_only_what_is_wanted_is_unpacked_and_read(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DIRECTORY_GUESS", 4096)
    directory = sources.site_packages("demo", "1.0")
    found = contents(directory)
    metadata = found.pop("demo-1.0.dist-info/METADATA")
    assert found == PYTHON
    assert b"Version: 1.0" in metadata
    assert index.sent < len(BINARY) / 10


def test_directory_is_named_by_release_and_digest(index: LocalIndex) -> None:
    sha256 = index.add("demo", NAME, index.files["demo"][NAME])
    assert sources.site_packages("demo", "1.0") == sources.cache_directory() / f"demo-1.0-{sha256[:12]}"


def test_members_far_apart_are_read_apart(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    index.add("demo", NAME, make_wheel("demo", "1.0", {**PYTHON, "demo/_between.so": BINARY, "demo/z.py": b"Z = 1\n"}))
    monkeypatch.setattr(sources, "DIRECTORY_GUESS", 4096)
    assert contents(sources.site_packages("demo", "1.0"))["demo/z.py"] == b"Z = 1\n"
    assert index.sent < len(BINARY) / 10


def test_pinned_release_is_fetched_once(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    pin_as(monkeypatch, index, sources.sources_digest(FILES.items() & PYTHON.items()))
    directory = sources.site_packages("demo", "1.0")
    asked = index.requests
    assert sources.site_packages("demo", "1.0") == directory
    assert index.requests == asked


def test_sources_other_than_the_pinned_ones_are_refused(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    pin_as(monkeypatch, index, "0" * 64)
    assert refusal() == f"{NAME}: the Python sources in it are not the pinned ones"


def test_table_of_a_new_release_pins_it(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    (table,) = tomllib.loads(sources.pin_table("demo", "1.0"))["demo"]
    pin = Pin(package="demo", **table)
    monkeypatch.setattr(registry, "all_pins", lambda package: (pin,))
    assert contents(sources.site_packages("demo", "1.0")).keys() > PYTHON.keys()


def test_digest_tells_names_and_contents_apart() -> None:
    digests = [
        sources.sources_digest(files)
        for files in ([("a.py", b"b")], [("a.py", b"")], [("a.pyb", b"")], [("a.py", b""), ("b.py", b"")], [])
    ]
    assert len(set(digests)) == len(digests) - 1  # what is no Python file does not count
    assert sources.sources_digest([("b.py", b"2"), ("a.py", b"1")]) == sources.sources_digest(
        [("a.py", b"1"), ("b.py", b"2")]
    )


def test_registrys_refusals_pass_through(index: LocalIndex) -> None:
    index.files["demo"].clear()
    assert refusal() == "demo 1.0 is not in the registry"


def test_connection_cut_short(index: LocalIndex) -> None:
    index.cut_short = True
    assert refusal() == f"the registry's {NAME} broke off in the middle of a part"


def test_ranges_ignored(index: LocalIndex) -> None:
    index.ignore_ranges = True
    assert refusal() == f"the registry's {NAME} at 127.0.0.1 cannot be read in parts: byte ranges are not served"


def test_file_gone_between_page_and_download(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = registry.find_wheel("demo", "1.0")
    index.status = 404
    monkeypatch.setattr(registry, "find_wheel", lambda *args: wheel)
    assert refusal() == f"the registry's {NAME} at 127.0.0.1 answered 404"


@pytest.mark.parametrize("damage", ["member", "directory"])
def test_damaged_wheel(index: LocalIndex, damage: str) -> None:
    content = bytearray(index.files["demo"][NAME])
    where = content.find(b"demo/big.py") + 40 if damage == "member" else content.rfind(b"demo/big.py") - 46
    content[where : where + 4] = b"\xff\xff\xff\xff"
    index.files["demo"][NAME] = bytes(content)
    assert refusal().startswith(f"the registry's {NAME} is damaged: ")


def test_member_outside_the_package_is_refused(index: LocalIndex) -> None:
    index.add("demo", NAME, make_wheel("demo", "1.0", {**FILES, "demo/../../evil.py": b""}))
    assert "refusing a member" in refusal()


def test_cache_that_cannot_be_written(index: LocalIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert refusal().startswith("cannot write ")


def test_many_at_once_leave_one_complete_directory(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(6)
    find_wheel = registry.find_wheel

    def find_together(package: str, version: str, session: object) -> registry.Wheel:
        barrier.wait(timeout=20)
        return find_wheel(package, version)

    monkeypatch.setattr(registry, "find_wheel", find_together)
    with ThreadPoolExecutor(6) as pool:
        found = set(pool.map(lambda _: sources.site_packages("demo", "1.0"), range(6)))
    (directory,) = found
    assert contents(directory).keys() > PYTHON.keys()
    assert list(sources.cache_directory().iterdir()) == [directory]


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_or_in_a_terminal_bars(
    index: LocalIndex, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index.add("more", "more-1.0-py3-none-any.whl", make_wheel("more", "1.0", {"more/__init__.py": b""}))
    sources.site_packages("demo", "1.0")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "fetching the sources of demo 1.0: 4 files, 0.0 MB\n"

    monkeypatch.setenv("XDG_CACHE_HOME", str(sources.cache_directory() / "second"))
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(lambda name: sources.site_packages(name, "1.0"), ["demo", "more"]))) == 2


def test_a_few_members_are_read_alone(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DIRECTORY_GUESS", 4096)
    wheel = registry.find_wheel("demo", "1.0")
    names = ["demo/deep/one.py", "demo/table.json", "demo/missing.py"]
    assert sources.read_members(wheel, names) == {name: FILES[name] for name in names[:2]}
    assert index.sent < len(BINARY) / 10
    assert not sources.cache_directory().exists()
