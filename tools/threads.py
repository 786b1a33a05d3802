"""Work of several threads that nobody has to wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(function: Callable[[Item], Result], items: Iterable[Item], at_once: int = 8) -> Iterator[Result]:
    """What `function` gives for each item, in the items' order; so many threads work on them.

    Daemon threads: after Ctrl-C, an error or a deadline the process ends without waiting for a server's answer.
    """
    todo: queue.SimpleQueue[tuple[Item, Future[Result]]] = queue.SimpleQueue()
    results: list[Future[Result]] = []
    for item in items:
        results.append(Future())
        todo.put((item, results[-1]))

    def work() -> None:
        while True:
            try:
                item, result = todo.get_nowait()
            except queue.Empty:
                return
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function(item))
                except BaseException as error:
                    result.set_exception(error)

    for _ in range(min(at_once, len(results))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for result in results:
            yield result.result()
    finally:
        for result in results:
            result.cancel()
