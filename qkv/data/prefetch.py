"""Compute results ahead of time in threads, and return them in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_PENDING_PER_WORKER = 2  # results that wait per worker


def prefetch_map(
    fn: Callable[[Item], Result], items: Iterable[Item], num_workers: int, name: str = "prefetch"
) -> Iterator[Result]:
    """Yield `fn(item)` for each item, in order; without workers it is computed on demand.

    The consumer's thread iterates over the items, a bounded number ahead, so `items` need not be thread-safe.
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
    finally:  # also when the consumer stops early and closes the generator
        executor.shutdown(wait=False, cancel_futures=True)
