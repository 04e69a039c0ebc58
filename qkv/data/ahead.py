"""Work done ahead of time in threads, handed on in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 2  # results in waiting for each worker


def ahead(work: Callable[[Item], Result], items: Iterable[Item], workers: int, name: str = "ahead") -> Iterator[Result]:
    """`work` of each item, in the items' order; without workers, when it is asked for.

    The items are read by whoever asks, a bounded number of them ahead, so that they need not be safe in threads.
    """
    if workers < 1:
        yield from map(work, items)
        return
    executor = ThreadPoolExecutor(workers, thread_name_prefix=name)
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(executor.submit(work, item))
            if len(waiting) > _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # also when the reader stops asking and the generator is closed
        executor.shutdown(wait=False, cancel_futures=True)
