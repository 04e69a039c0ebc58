"""SIGINT and SIGTERM while a run trains: a checkpoint is written at the next step, and the run ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HINT = b"\nstopping after this step; press Ctrl-C again to end at once\n"


class TrainingInterrupted(KeyboardInterrupt):
    """A signal ended a run after a checkpoint was written; the message is for the user."""

    def __init__(self, step: int, signum: int) -> None:
        super().__init__(f"interrupted at step {step:,}; checkpoint saved; run the same command to resume")
        self.exit_code = 128 + signum  # as shells report a process that a signal ended


class StopRequest:
    """The first SIGINT or SIGTERM inside the block asks the run to stop; a second one has its usual effect.

    A handler of the program's own is left in place, and so is a signal that the program ignores.
    """

    def __init__(self) -> None:
        self.signum: int | None = None  # the signal that was received
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers in no other thread
            for signum in _SIGNALS:
                handler = signal.getsignal(signum)
                if handler in (signal.SIG_DFL, signal.default_int_handler):
                    self._previous[signum] = handler
                    signal.signal(signum, self._receive)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _receive(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.signum = signum
        self._restore()
        if signum == signal.SIGINT and sys.stderr is not None and sys.stderr.isatty():
            os.write(2, _HINT)  # a validation or a checkpoint may take a while

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()


class StopVotes:
    """The processes' sum of stop requests, read one step later, so that no step waits for its own exchange.

    All processes read the sum of the same step, and therefore stop at the same step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: list[tuple[Tensor, torch.cuda.Event | None]] = []  # of the last two steps

    def add(self, count: Tensor) -> None:
        """Add the number of processes that ask to stop, [1] on the device."""
        if self._device.type != "cuda":
            self._counts.append((count.clone(), None))
        else:
            host_count = torch.empty(1, dtype=count.dtype, pin_memory=True)
            host_count.copy_(count, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._counts.append((host_count, event))
        self._counts = self._counts[-2:]

    def any_in_previous_step(self) -> bool:
        """Return whether a process asked to stop in the step before the last one."""
        if len(self._counts) < 2:
            return False
        count, event = self._counts[0]
        if event is not None:
            event.synchronize()
        return bool(count.item())
