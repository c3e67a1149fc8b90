"""Ctrl-C as a polite request: finish the step, keep the state, stop."""

import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """A measurement was asked to stop; everything up to ``step`` is in the checkpoint.

    Attributes:
        step: number of finished steps.
        checkpoint: file with the state; None if none is kept.
    """

    def __init__(self, step: int = 0, checkpoint: Path | None = None) -> None:
        super().__init__(f"stopped before step {step}")
        self.step = step
        self.checkpoint = checkpoint


class StopRequest:
    """Context in which the first SIGINT or SIGTERM sets a flag instead of raising; a second SIGINT raises at once.

    Call it to ask whether a stop was requested. Outside the main thread signals are left alone.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Whether a stop was requested."""
        return self.requested

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not the main thread
                return self
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
