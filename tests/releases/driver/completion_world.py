# mypy: disable-error-code="import-not-found"
"""A load whose request is aborted, and what a connector's own code says of it: shared by the connectors' cases.

The objects are a release's own, made without their constructors, which ask for devices, servers and peers: what the
methods under test look at is given to them, and what they call beyond themselves is a double.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
ID = "aborted"


class Load:
    """A request's load by one connector. `end` lets it end; `finished` and `report` are the connector's own answers."""

    def __init__(
        self,
        end: Callable[[], None],
        finished: Callable[[], bool],
        report: Callable[[set[str]], tuple[Any, Any]],
    ) -> None:
        self.end, self.finished, self.report = end, finished, report


def play(load: Callable[[], Load]) -> dict[str, Any]:
    """Abort the request while its load is on, and when the load has just ended; return what was said in either case.

    `announced` is the first element of what `request_finished` returns. A report is `S` for finished_sending, `R` for
    finished_recving, both, or nothing, one for each `get_finished`: before the abort, with the id among the finished
    ones, and twice after it.
    """
    passed: dict[str, Any] = {}
    for name, ends_before in (("under_way", False), ("ended", True)):
        made = load()
        reports = [reported(made.report(set()))]
        if ends_before:
            made.end()
        passed["announced"] = made.finished()
        reports.append(reported(made.report({ID})))
        if not ends_before:
            made.end()
        reports += [reported(made.report(set())), reported(made.report(set()))]
        passed[name] = reports
    return passed


def reported(completions: tuple[Any, Any]) -> str:
    """Say which of the completions has been reported for the request."""
    sending, recving = completions
    return ("S" if ID in (sending or ()) else "") + ("R" if ID in (recving or ()) else "")


def bare(cls: type, **attributes: Any) -> Any:
    """Return an object of a real class, made of these attributes; it has nothing to shut down when it goes."""
    quiet = type(cls.__name__, (cls,), {"__del__": lambda self: None, "__module__": cls.__module__})
    made = quiet.__new__(quiet)
    made.__dict__.update(attributes)
    return made


def found(name: str, *modules: str) -> Any:
    """Return a class by its name from the first of these modules that the release has and that has it."""
    for module in modules:
        try:
            imported = importlib.import_module(module if module.startswith("vllm.") else f"{V1}.{module}")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("vllm"):
                raise
            continue
        if hasattr(imported, name):
            return getattr(imported, name)
    return None


def request(status: str = "FINISHED_ABORTED", **parameters: Any) -> Any:
    """Return what connectors look at of a request that has ended."""
    from vllm.v1.request import RequestStatus

    return SimpleNamespace(
        request_id=ID, status=RequestStatus[status], kv_transfer_params=parameters or None, is_finished=lambda: True
    )


def source_of(cls: type) -> str:
    """The text of a class and its bases, of the release's own modules."""
    return "".join(inspect.getsource(base) for base in cls.__mro__ if base.__module__.startswith("vllm."))
