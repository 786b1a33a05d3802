"""What the offline check costs, against downloading the wheels: bytes and requests to the registry, and seconds.

    python -m vllm_livepatch.tools.bench.offline_check [--json]

Each line is a process of its own, from its start to its end, with a cache that is empty (cold) or was just filled. The
bytes are those of the answers' bodies. The sizes of the wheels are asked for, and the wheels are not downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm_livepatch.sitecustomize.decision import module_of
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.compatibility import check
from vllm_livepatch.tools.releases import published, registry

PACKAGES = ("vllm", "lmcache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--measured", nargs="+", metavar="PKG==VERSION", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measured:
        verdicts = judged([tuple(release.split("==")) for release in arguments.measured])
        traffic = registry.traffic
        print(json.dumps({"requests": traffic.answers, "bytes": traffic.bytes, "verdicts": verdicts}))
        return
    newest = [f"{package}=={registry.pins(package)[-1].version}" for package in PACKAGES]
    every = [f"{package}=={pin.version}" for package in PACKAGES for pin in registry.pins(package)]
    size = wheel_sizes(every)
    rows: list[dict[str, Any]] = []
    for what, releases in ((newest[0], newest[:1]), (newest[1], newest[1:]), ("all pinned releases", every)):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "from the cache"):
                rows.append({"what": what, "cache": state, **measured(releases, cache)})
                rows[-1]["wheels"] = sum(size[release] for release in releases)
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("checked", "cache", "verdicts", "requests", "MB", "seconds", "MB of wheels"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("checked", "cache") else "right")
    for row in rows:
        numbers = f"{row['bytes'] / 1e6:.2f}", f"{row['seconds']:.2f}", f"{row['wheels'] / 1e6:.0f}"
        table.add_row(row["what"], row["cache"], str(row["verdicts"]), str(row["requests"]), *numbers)
    Console(width=100).print(table)


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


def measured(releases: list[str], cache: str) -> dict[str, Any]:
    """One process that judges `releases`, with its cache in the directory `cache`."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--measured", *releases],
        env={**os.environ, "XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE,
        check=True,
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
