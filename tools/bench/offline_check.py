"""What the offline check costs, against downloading the wheels: bytes and requests to the registry, and seconds.

    python -m vllm_livepatch.tools.bench.offline_check

Each line is a process of its own, from its start to its end, with a cache that is empty (cold) or was just filled. The
bytes are those of the answers' bodies. The sizes of the wheels are asked for, and the wheels are not downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm_livepatch.sitecustomize.decision import module_of
from vllm_livepatch.tools import cli
from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.compatibility import check
from vllm_livepatch.tools.releases import PACKAGES, published, registry

PAIR_ROUNDS = 5
_MODULE = "vllm_livepatch.tools.bench.offline_check"


def measured() -> Figures:
    """A row for each set of releases, with an empty cache and with a filled one; and for the README's pair."""
    newest = [f"{package}=={registry.pins(package)[-1].version}" for package in PACKAGES]
    every = [f"{package}=={pin.version}" for package in PACKAGES for pin in registry.pins(package)]
    size = wheel_sizes(every)
    judged_sets = {
        f"`{newest[0]}`": newest[:1],
        f"`{newest[1]}`": newest[1:],
        f"all {len(every)} pinned releases": every,
    }
    rows = []
    for what, releases in judged_sets.items():
        with tempfile.TemporaryDirectory() as cache:
            for state in ("empty", "filled"):
                one = processed(["-m", _MODULE, "--measured", *releases], cache)
                rows.append(_row(what, state, str(one["verdicts"]), one, sum(size[release] for release in releases)))
    both = [word for release in newest for word in ("--release", release)]
    pairs = []
    for _ in range(PAIR_ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            pairs.append(processed(["-m", _MODULE, "--pair", *both], cache))
    median = sorted(pairs, key=lambda one: one["seconds"])[PAIR_ROUNDS // 2]
    what = f"`vllm-livepatch check {' '.join(both)}`, whether they fit too; median of {PAIR_ROUNDS}"
    rows.append(_row(what, "empty", "", median, sum(size[release] for release in newest)))
    columns = ("a process, from its start to its end", "cache", "verdicts", "requests", "MB", "seconds", "MB of wheels")
    return Figures("python -m vllm_livepatch.tools.bench.offline_check", columns, rows)


def _row(what: str, state: str, verdicts: str, one: dict[str, Any], wheels: int) -> list[str]:
    traffic = [str(one["requests"]), f"{one['bytes'] / 1e6:.2f}", f"{one['seconds']:.2f}"]
    return [what, state, verdicts, *traffic, f"{wheels / 1e6:,.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", nargs="+", metavar="PKG==VERSION", help=argparse.SUPPRESS)
    parser.add_argument("--pair", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    traffic = registry.traffic
    if arguments.pair:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            cli.app(["check", *arguments.pair])
        print(json.dumps({"requests": traffic.answers, "bytes": traffic.bytes}))
    elif arguments.measured:
        verdicts = judged([tuple(release.split("==")) for release in arguments.measured])
        print(json.dumps({"requests": traffic.answers, "bytes": traffic.bytes, "verdicts": verdicts}))
    else:
        measured().show()


def judged(releases: list[tuple[str, ...]]) -> int:
    """Every patch's verdict on every release; how many that were."""
    entries = catalogue.load()
    published_releases = published.PublishedReleases()

    def read(release: tuple[str, ...]) -> published.PublishedTree:
        tree = published_releases.tree(*release)
        tree.prefetch(
            module_of(name)
            for entry in entries.values()
            if entry.patch.package == tree.package
            for name in entry.patch.names
        )
        return tree

    count = 0
    with ThreadPoolExecutor(8) as pool:
        for tree in pool.map(read, releases):
            own = {name: entry for name, entry in entries.items() if entry.patch.package == tree.package}
            changes = {name: entry.changes() for name, entry in own.items()}
            _, answers = check.check(
                [entry.patch for entry in own.values()], check.CombinedTree(None, {tree.package: tree}), changes
            )
            count += len(answers)
    return count


def processed(words: list[str], cache: str) -> dict[str, Any]:
    """One process, with its cache in the directory `cache`: its seconds, and what it prints."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, "XDG_CACHE_HOME": cache}, stdout=subprocess.PIPE, check=True
    )
    return {"seconds": time.perf_counter() - begun, **json.loads(done.stdout)}


def wheel_sizes(releases: list[str]) -> dict[str, int]:
    """The bytes of each release's wheel, as the registry's server says."""
    published_releases = published.PublishedReleases()
    session = registry.open_session()

    def size(release: str) -> int:
        package, _, version = release.partition("==")
        wheel = registry.find_file(package, version, published_releases.offered(package))
        answer = session.head(wheel.url, timeout=registry.TIMEOUT, allow_redirects=True)
        answer.raise_for_status()
        return int(answer.headers["Content-Length"])

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(releases, pool.map(size, releases), strict=True))


if __name__ == "__main__":
    main()
