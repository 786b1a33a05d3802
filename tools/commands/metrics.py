"""`status` for Prometheus: a page that is scraped, or a text file for node_exporter. No label holds a free text."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle import status
from vllm_livepatch.tools.in_bundle.reading import STATES

Process = dict[str, Any]


class Reports(Collector):
    """The metrics of what `read` gives, asked anew at each scrape."""

    def __init__(self, read: Callable[[], status.Reports]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Nothing is read when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "livepatch_info",
            "A live patched process and the bundle that it runs.",
            labels=("version", "digest", "host", "pid"),
        )
        states = GaugeMetricFamily(
            "livepatch_patch",
            "A patch in a process: applied, failed, or skipped although it is wanted.",
            labels=("patch", "state", "verdict", "host", "pid"),
        )
        numbers = GaugeMetricFamily(
            "livepatch_patches",
            "How many patches of a process are armed, applied, skipped or failed.",
            labels=("state", "host", "pid"),
        )
        missing = GaugeMetricFamily(
            "livepatch_patch_missing",
            "A patch that is wanted in a process and is not applied.",
            labels=("patch", "reason", "host", "pid"),
        )
        versions = GaugeMetricFamily(
            "livepatch_patch_version",
            "The version of a patch in a process: raised with each change of its code or facts.",
            labels=("patch", "host", "pid"),
        )
        events = CounterMetricFamily(
            "livepatch_events",
            "What a patch has counted in a process: vllm-livepatch show PATCH tells what each kind is.",
            labels=("patch", "kind", "host", "pid"),
        )
        heartbeat = GaugeMetricFamily(
            "livepatch_heartbeat_timestamp_seconds",
            "When a process last wrote its report, every minute at least.",
            labels=("host", "pid"),
        )
        found = named(self._read())
        for pid, process in found:
            who = (str(process["host"]), pid)
            info.add_metric((process["version"] or "", process["digest"] or "", *who), 1)
            if process["heartbeat"] is not None:
                heartbeat.add_metric(who, process["heartbeat"])
            counts = Counter(patch["state"] for patch in process["patches"])
            for state in STATES:
                numbers.add_metric((state, *who), counts[state])
            for patch in process["patches"]:
                for kind, number in patch["counters"].items():
                    events.add_metric((patch["name"], kind, *who), number)
                if status.is_missing(patch):
                    missing.add_metric((patch["name"], patch["reason"] or "", *who), 1)
                elif patch["state"] != "applied":
                    continue  # nothing runs there, and nothing is amiss: a series of each was most of a page
                states.add_metric((patch["name"], patch["state"], patch["verdict"] or "", *who), 1)
                if patch.get("version") is not None:
                    versions.add_metric((patch["name"], *who), patch["version"])
        processes = GaugeMetricFamily("livepatch_processes", "How many live patched processes this page is about.")
        processes.add_metric((), len(found))
        yield from (processes, info, numbers, states, versions, missing, events, heartbeat)


def named(reports: status.Reports) -> list[tuple[str, Process]]:
    """Each live process with what the label `pid` says: Prometheus refuses a page that has a series twice.

    Where two PID namespaces of a host both have the pid, it is followed by the namespace. Processes that cannot be seen
    from here and have fallen silent are left out.
    """
    by_pid: dict[tuple[str, int], dict[str | None, Process]] = {}
    for process, seen in zip(reports.live, reports.seen, strict=True):
        if seen or process["heartbeat"] is None or status.is_heard_of(process):
            same = by_pid.setdefault((process["host"], process["pid"]), {})
            before = same.get(process["pid_namespace"])
            if before is None or (before["heartbeat"] or 0) < (process["heartbeat"] or 0):
                same[process["pid_namespace"]] = process  # the pid was given to another one since
    return [
        (str(pid) if len(same) == 1 else f"{pid} in {namespace}", process)
        for (_, pid), same in by_pid.items()
        for namespace, process in same.items()
    ]


def write(reports: status.Reports, file: Path) -> None:
    """The metrics as a file for node_exporter's textfile collector: replaced as a whole. Raises UserError."""
    if file.exists() and not file.is_file():
        raise UserError(f"{file} cannot be written: it is no file")  # a device, which would be replaced as well
    try:
        write_to_textfile(str(file), registry(lambda: reports))
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from error


def serve(directory: Path, port: int, address: str) -> None:
    """Answer scrapes until Ctrl-C. Raises UserError."""
    try:
        server, thread = start_http_server(port, address, registry(lambda: status.read(directory)))
    except (OSError, OverflowError) as error:
        raise UserError(f"nothing can be served on {address}, port {port}: {error}") from error
    host = f"[{address}]" if ":" in address else address
    print(f"serving http://{host}:{server.server_port}/metrics", file=sys.stderr, flush=True)
    try:
        thread.join()
    finally:
        server.shutdown()
        server.server_close()


def registry(read: Callable[[], status.Reports]) -> CollectorRegistry:
    """What answers a scrape, from the reports that `read` gives at that time."""
    found = CollectorRegistry()
    found.register(Reports(read))
    return found
