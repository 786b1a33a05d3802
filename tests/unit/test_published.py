"""Modules of published releases: only what is asked for, kept whole or not at all, and a line for all that goes wrong."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import cache
from vllm_livepatch.sitecustomize.installed import Tree, release
from vllm_livepatch.tools.releases import archives, published, registry, sources
from vllm_livepatch.tools.releases.published import PublishedReleases, PublishedTree
from vllm_livepatch.tools.releases.registry import Pin
from vllm_livepatch.tools.releases.sources import SourcesError

from tests.unit.local_index import BINARY, LocalIndex, make_source_archive, make_wheel, serving

NAME = "demo-1.0-py3-none-any.whl"
ARCHIVE = "demo-1.1.tar.gz"
FILES = {
    "demo/__init__.py": b"raise SystemExit('executed')\n",
    "demo/_version.py": b'__version__ = "1.0"\n',
    "demo/one.py": b"# coding: latin-1\nONE = '\xe9'\n",
    "demo/two.py": b"TWO = 'the module'\n",
    "demo/two/__init__.py": b"TWO = 'the package'\n",
    "demo/deep/three.py": b"THREE = 3\n" * 1000,
    "demo/broken.py": b"\xff\xfe",
    "demo/_native.so": b"",
}


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalIndex]:
    """A local index that offers demo 1.0 as a wheel, and 1.1 as a source archive; the user's cache is empty."""
    with serving(LocalIndex()) as index:
        index.add("demo", NAME, make_wheel("demo", "1.0", FILES))
        index.add("demo", ARCHIVE, make_source_archive("demo", "1.1", FILES))
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(sources, "DIRECTORY_GUESS", 4096)
        monkeypatch.setattr(registry, "all_pins", lambda package: ())
        yield index


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def published_releases(index: LocalIndex, notices: list[str]) -> PublishedReleases:
    return PublishedReleases(notices.append)


def unpacked(place: Path) -> Tree:
    for name, content in FILES.items():
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return Tree([str(place)])


def refusal(published_releases: PublishedReleases, version: str = "1.0", module: str = "demo.one") -> str:
    """The one line with which a release cannot be read, without the index's password; the cache is not left broken."""
    with pytest.raises(SourcesError) as caught:
        published_releases.tree("demo", version).source(module)
    message = str(caught.value)
    assert "\n" not in message
    assert "secret" not in message
    assert_sound()
    return message


def kept() -> dict[str, bytes]:
    """What the cache holds of releases, by the paths below it."""
    root = sources.cache_directory().with_name("published")
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def assert_sound() -> None:
    """Nothing half-written, nothing of another content."""
    for name, content in kept().items():
        assert not name.endswith(".tmp")
        if name.endswith(".json"):
            assert json.loads(content)
        else:
            assert content == FILES[name.partition("/files/")[2]]


def test_a_tree_is_as_an_installed_one(published_releases: PublishedReleases, tmp_path: Path) -> None:
    tree, other = published_releases.tree("demo", "1.0"), unpacked(tmp_path / "unpacked")
    for module in ("demo", "demo.one", "demo.two", "demo.deep.three", "demo.deep", "demo.broken", "demo._native", "no"):
        assert tree.source(module) == other.source(module), module
        ours, theirs = tree.origin(module), other.origin(module)
        if module != "demo._native":  # it has no source, and only sources are listed
            assert ours == (None if theirs is None else f"{NAME}/{Path(theirs).relative_to(tmp_path / 'unpacked')}")
            assert tree.has(module) == (theirs is not None)
    assert release("demo", tree) == "1.0"
    assert tree.tops == {"demo"}


def test_only_what_is_asked_for_is_read_and_only_once(index: LocalIndex, published_releases: PublishedReleases) -> None:
    tree = published_releases.tree("demo", "1.0")
    tree.prefetch(["demo.one", "demo.two", "demo.absent"])
    asked = index.requests
    assert tree.source("demo.one")
    assert tree.source("demo.absent") is None
    assert index.requests == asked
    assert index.sent < len(BINARY) / 10
    assert {name.partition("/files/")[2] for name in kept() if "/files/" in name} == {
        "demo/one.py",
        "demo/two/__init__.py",
    }


def test_what_was_read_is_kept_and_more_is_added(index: LocalIndex, published_releases: PublishedReleases) -> None:
    first = published_releases.tree("demo", "1.0").source("demo.one")
    sent = index.sent
    again = PublishedReleases().tree("demo", "1.0")
    assert again.source("demo.one") == first
    assert index.sent == sent
    assert again.source("demo.deep.three")
    assert index.sent > sent


@pytest.mark.parametrize("damage", [b"", b"ONE = 2\n"])
def test_a_damaged_file_of_the_cache_is_read_again(
    index: LocalIndex, published_releases: PublishedReleases, damage: bytes
) -> None:
    first = published_releases.tree("demo", "1.0").source("demo.one")
    (file,) = sources.cache_directory().with_name("published").rglob("one.py")
    file.write_bytes(damage)
    assert PublishedReleases().tree("demo", "1.0").source("demo.one") == first
    assert_sound()


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"demo'])
def test_a_damaged_list_of_the_cache_is_read_again(
    index: LocalIndex, published_releases: PublishedReleases, damage: bytes
) -> None:
    first = published_releases.tree("demo", "1.0").source("demo.one")
    (file,) = sources.cache_directory().with_name("published").rglob("list.json")
    file.write_bytes(damage)
    assert PublishedReleases().tree("demo", "1.0").source("demo.one") == first
    assert_sound()


def test_a_wheel_of_another_content_under_the_same_name_is_another(
    index: LocalIndex, published_releases: PublishedReleases
) -> None:
    assert published_releases.tree("demo", "1.0").source("demo.two") == "TWO = 'the package'\n"
    index.add("demo", NAME, make_wheel("demo", "1.0", {"demo/two.py": b"TWO = 2\n"}))
    assert PublishedReleases().tree("demo", "1.0").source("demo.two") == "TWO = 2\n"


@pytest.mark.parametrize("damage", ["member", "directory"])
def test_damaged_wheel(index: LocalIndex, published_releases: PublishedReleases, damage: str) -> None:
    content = bytearray(index.files["demo"][NAME])
    where = content.find(b"demo/one.py") + 14 if damage == "member" else content.rfind(b"demo/one.py") - 46
    content[where : where + 4] = b"\xff\xff\xff\xff"
    index.files["demo"][NAME] = bytes(content)
    assert refusal(published_releases).startswith(f"the registry's {NAME} is damaged: ")


def test_truncated_range(index: LocalIndex, published_releases: PublishedReleases) -> None:
    index.cut_short = True
    assert refusal(published_releases) == f"the registry's {NAME} broke off in the middle of a part"
    index.cut_short = False
    assert PublishedReleases().tree("demo", "1.0").source("demo.one")


def test_where_ranges_are_ignored_the_wheel_is_read_whole(
    index: LocalIndex, published_releases: PublishedReleases, notices: list[str], tmp_path: Path
) -> None:
    index.ignore_ranges = True
    tree, other = published_releases.tree("demo", "1.0"), unpacked(tmp_path / "unpacked")
    for module in ("demo.one", "demo.two", "demo.deep.three"):
        assert tree.source(module) == other.source(module)
    assert notices[0] == f"{NAME}: the server gives no parts of a file, so it is read whole"
    asked = index.requests
    assert PublishedReleases().tree("demo", "1.0").source("demo.deep.three")
    assert index.requests == asked + 1  # the index: nobody pinned this release
    assert_sound()


def test_a_whole_wheel_that_is_damaged(index: LocalIndex, published_releases: PublishedReleases) -> None:
    index.ignore_ranges = True
    index.digests[NAME] = "0" * 64
    assert refusal(published_releases) == f"the registry's {NAME} is damaged: its SHA-256 is not what the registry says"


def test_a_whole_wheel_that_breaks_off(index: LocalIndex, published_releases: PublishedReleases) -> None:
    index.ignore_ranges = index.cut_short = True
    index.cut_whole = True
    assert f"the registry's {NAME} broke off" in refusal(published_releases)


def test_a_missing_release(published_releases: PublishedReleases) -> None:
    assert refusal(published_releases, "9.9") == "demo 9.9 is not in the registry; the newest there is 1.1"


@pytest.mark.parametrize("below", ["", "src/"])
def test_a_release_without_a_wheel(index: LocalIndex, published_releases: PublishedReleases, below: str) -> None:
    index.add("demo", ARCHIVE, make_source_archive("demo", "1.1", FILES, below))
    tree = published_releases.tree("demo", "1.1")
    assert tree.source("demo.two") == "TWO = 'the package'\n"
    assert release("demo", tree) == "1.1"
    assert tree.tops == {"demo"}
    assert_sound()


def test_a_source_archive_that_is_damaged(index: LocalIndex, published_releases: PublishedReleases) -> None:
    index.add("demo", ARCHIVE, index.files["demo"][ARCHIVE][:200])
    assert refusal(published_releases, "1.1").startswith(f"the registry's {ARCHIVE} is damaged: ")


def test_a_yanked_release_is_read_and_named_as_yanked(
    index: LocalIndex, published_releases: PublishedReleases, notices: list[str]
) -> None:
    index.yanked.add(NAME)
    assert published_releases.tree("demo", "1.0").source("demo.one")
    assert notices == ["demo 1.0 was yanked: broken"]


def test_no_network(index: LocalIndex, monkeypatch: pytest.MonkeyPatch, notices: list[str]) -> None:
    first = PublishedReleases().tree("demo", "1.0").source("demo.one")
    with serving(LocalIndex()) as gone:
        pass
    monkeypatch.setattr(PublishedReleases, "offered", unreachable(gone.url))
    published_releases = PublishedReleases(notices.append)
    assert published_releases.tree("demo", "1.0").source("demo.one") == first
    assert notices == ["demo 1.0 is from the cache: the registry at 127.0.0.1 cannot be reached; is there a network?"]
    assert refusal(published_releases, "1.1") == "the registry at 127.0.0.1 cannot be reached; is there a network?"


def unreachable(url: str) -> Any:
    """`PublishedReleases.offered` of an index that is gone."""

    def offered(self: PublishedReleases, package: str) -> Any:
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PIP_INDEX_URL", url)
                return registry.files(package)
        except registry.RegistryError as error:
            raise SourcesError(str(error)) from error

    return offered


def test_a_pinned_release_needs_no_network_once_read(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = (Pin("demo", "1.0", NAME, index.add("demo", NAME, index.files["demo"][NAME]), ""),)
    monkeypatch.setattr(registry, "all_pins", lambda package: pinned)
    first = PublishedReleases().tree("demo", "1.0").source("demo.one")
    asked = index.requests
    tree = PublishedReleases().tree("demo", "1.0")
    assert tree.source("demo.one") == first
    assert index.requests == asked
    assert tree.source("demo.deep.three")  # what was never asked for still is to be had


def test_whole_sources_that_are_there_serve(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = index.add("demo", NAME, make_wheel("demo", "1.0", {"demo/two.py": b"TWO = 2\n"}))
    digest = sources.sources_digest([("demo/two.py", b"TWO = 2\n")])
    monkeypatch.setattr(registry, "all_pins", lambda package: (Pin("demo", "1.0", NAME, sha256, digest),))
    sources.site_packages("demo", "1.0")
    asked = index.requests
    assert PublishedReleases().tree("demo", "1.0").source("demo.two") == "TWO = 2\n"
    assert index.requests == asked


def test_a_full_disk_costs_only_time(
    published_releases: PublishedReleases, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "open", full, raising=False)
    assert published_releases.tree("demo", "1.0").source("demo.one")
    assert any("cannot be written" in line for line in notices)
    assert kept() == {}


def test_a_full_disk_under_a_wheel_that_is_read_whole(
    index: LocalIndex, published_releases: PublishedReleases, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.ignore_ranges = True
    monkeypatch.setattr(archives, "_download", full)
    assert refusal(published_releases).endswith(": No space left on device")


def full(*arguments: object, **options: object) -> Any:
    """What opening a file, or writing one, comes to."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_checks_at_once_on_one_cache(index: LocalIndex) -> None:
    barrier = threading.Barrier(6)

    def read(number: int) -> str | None:
        barrier.wait(timeout=20)
        tree = PublishedReleases().tree("demo", "1.0")
        tree.prefetch(["demo.one", "demo.deep.three"])
        return tree.source("demo.one")

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(read, range(6)))) == 1
    assert_sound()
    assert sum(name.endswith("deep/three.py") for name in kept()) == 1


def test_a_vendors_local_version_is_the_public_release(
    published_releases: PublishedReleases, notices: list[str]
) -> None:
    tree = published_releases.tree("demo", "1.0+rocm700")
    assert tree.source("demo.two") == "TWO = 'the package'\n"
    assert release("demo", tree) == "1.0+rocm700"
    assert notices == ["demo 1.0+rocm700 is not in the registry: 1.0 is read in its place"]


def test_a_local_version_of_another_index(
    index: LocalIndex, published_releases: PublishedReleases, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "demo-1.2.dev3+g1234567.rocm700-py3-none-any.whl"
    with serving(LocalIndex()) as nightly:
        nightly.add(
            "demo", name, make_wheel("demo", "1.2.dev3+g1234567.rocm700", {"demo/two.py": b"TWO = 'nightly'\n"})
        )
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"file:///nowhere {nightly.url}")
        for version in ("1.2.dev3", "1.2.dev3+g1234567.rocm700"):
            tree = published_releases.tree("demo", version)
            assert tree.source("demo.two") == "TWO = 'nightly'\n"
            assert release("demo", tree) == "1.2.dev3+g1234567.rocm700"
        assert published_releases.newest("demo") == "1.0"  # no source archive, no nightly


def test_a_version_is_compared_as_one(published_releases: PublishedReleases) -> None:
    assert release("demo", published_releases.tree("Demo", "1")) == "1.0"


def test_pips_own_configuration_names_the_index(
    index: LocalIndex, published_releases: PublishedReleases, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PIP_INDEX_URL")
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {index.url}\nextra-index-url = file:///nowhere\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert published_releases.tree("demo", "1.0").source("demo.one")
    (tmp_path / "pip.conf").write_bytes(b"\xff[")
    assert registry.endpoints()[0] != index.url


def test_a_file_that_says_it_is_enormous(
    published_releases: PublishedReleases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "LARGEST", 100)
    assert refusal(published_releases, module="demo.deep.three").endswith(
        "demo/deep/three.py is no Python file of 10000 bytes"
    )


# A wheel on this machine


def test_a_wheel_file(tmp_path: Path) -> None:
    file = tmp_path / NAME
    file.write_bytes(make_wheel("demo", "1.0", FILES))
    tree = published.wheel_file(file)
    assert isinstance(tree, PublishedTree)
    assert tree.source("demo.two") == "TWO = 'the package'\n"
    assert tree.source("demo.none") is None
    assert release("demo", tree) == "1.0"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("demo.zip", b"", "is not named as a wheel is"),
        (NAME, b"PK", "is damaged: "),
        (NAME, None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_wheel(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SourcesError, match=message):
        published.wheel_file(tmp_path / name)


def test_nothing_of_a_target_was_executed() -> None:
    assert "demo" not in sys.modules


def test_the_list_of_files_is_read_once(index: LocalIndex, published_releases: PublishedReleases) -> None:
    """It is most of what there is to read, in a wheel of thousands of files."""
    tree = published_releases.tree("demo", "1.0")
    before = index.requests
    for module in ("demo.one", "demo.two", "demo.deep.three"):
        assert tree.source(module)
    assert index.requests == before + 3
