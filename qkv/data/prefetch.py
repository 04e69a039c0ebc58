"""Work done ahead of time in threads, handed on in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_PENDING_PER_WORKER = 2  # results in waiting for each worker


def prefetch_map(fn: Callable[[Item], Result], items: Iterable[Item], num_workers: int, name: str = "prefetch") -> Iterator[Result]:
    """`fn` of each item, in the items' order; without workers, when it is asked for.

    The items are read by whoever asks, a bounded number of them ahead, so that they need not be safe in threads.
    """
    if num_workers < 1:
        yield from map(fn, items)
        return
    executor = ThreadPoolExecutor(num_workers, thread_name_prefix=name)
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(fn, item))
            if len(pending) > _PENDING_PER_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:  # also when the reader stops asking and the generator is closed
        executor.shutdown(wait=False, cancel_futures=True)
