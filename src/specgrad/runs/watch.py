"""`Watch`: how a measurement reports, keeps its state and is asked to stop."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgrad.runs.interrupt import Interrupted

OnStep = Callable[[int, float], None]
OnRecord = Callable[[int, dict[str, Any]], None]


@dataclass(frozen=True)
class Watch:
    """What surrounds a measurement; every part may be missing.

    Attributes:
        on_step: called with the number of finished steps and a number worth watching, such as the loss. A setting called
            ``steps`` is the number that progress is measured against.
        should_stop: True asks the measurement to keep its state and raise `specgrad.runs.Interrupted` at the next chance.
        checkpoint: file where an unfinished measurement keeps its state.
        on_record: called with a step and a record as soon as the record is there, see `specgrad.runs.tracker`.
    """

    on_step: OnStep | None = None
    should_stop: Callable[[], bool] | None = None
    checkpoint: Path | None = None
    on_record: OnRecord | None = None

    def finished(self, step: int, value: float | int) -> None:
        """Reports ``step`` finished steps with a number worth watching, and stops the measurement if that is asked for.

        For measurements that keep no state of their own; the others look at ``should_stop`` themselves.

        Raises:
            Interrupted: if the measurement should stop; nothing is stored of it.
        """
        if self.on_step is not None:
            self.on_step(step, value)
        if self.should_stop is not None and self.should_stop():
            raise Interrupted(step)
