"""What `status` does for a person at a terminal, for a script, and for Prometheus."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from vllm_livepatch.tools.commands import rendering
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle import command, status, summary
from vllm_livepatch.tools.in_bundle.verifying import check_digest


def run(
    directory: Path, asked: command.Asked, watch: bool, prometheus: Path | None, serve: int | None, address: str
) -> int:
    """The exit code. Raises UserError."""
    if prometheus is not None or serve is not None:
        if watch or asked.as_json or asked.summary:
            raise UserError("--prometheus and --serve go without --watch, --json and --summary")
        return _measured(directory, asked, prometheus, serve, address)
    if watch and (asked.as_json or asked.summary):
        command.watch(directory, asked)
    if watch:
        check_digest(asked.digest)
        with Live(console=Console(), refresh_per_second=2) as live:
            while True:
                live.update(rendering.status_view(status.read(directory), directory, asked.everything))
                time.sleep(1)

    def show(reports: status.Reports) -> None:
        if summary.is_a_crowd(reports, asked.everything):
            command.say(summary.overview(reports))  # lines as wide as a pipe takes them
            return
        Console().print(rendering.status_view(reports, directory, asked.everything))

    return command.show_status(directory, asked, show)


def _measured(directory: Path, asked: command.Asked, prometheus: Path | None, serve: int | None, address: str) -> int:
    from vllm_livepatch.tools.commands import metrics  # a tenth of a second

    check_digest(asked.digest)
    reports = status.read(directory)
    required = status.requirements(reports, asked.require, asked.patches)
    reports, forgotten = status.forget(reports, asked.forget)
    if prometheus is not None:
        metrics.write(reports, prometheus)
    if serve is not None:
        metrics.serve(directory, serve, address)
        reports = status.read(directory)
    command.complain(forgotten)
    return command.settled(reports, required, asked)
