"""What follows an optimizer on the ranks that do not decide."""

from __future__ import annotations

from zenflow.optimizer import ZenFlowOptimizer
from zftune.tuner.following import Tuner
from zftune.tuner.nobody import Nobody, Nothing
from zftune.tuner.ranks.accord import Accord
from zftune.tuner.settings import Setting


class Follower(Tuner):
    """Changes knobs as rank 0 wants, with the others, and tells them where this rank's loss goes wrong.

    Args:
        optimizer: that trains.
        accord: of the ranks.
    """

    def __init__(self, optimizer: ZenFlowOptimizer, accord: Accord) -> None:
        super().__init__(optimizer, Nobody(), tokens=1, disturbance=Nothing(), accord=accord)
        self._agreed = accord

    @property
    def incumbent(self) -> Setting:
        """The best knobs so far, as far as this rank has heard."""
        keeps = self._agreed.keeps
        return super().incumbent if keeps is None else Setting.from_knobs(keeps)

    def _follow(self) -> None:
        if self._agreed.over:
            self.notices += [self._agreed.reason] if self._agreed.reason else []
            self._finish()
        elif not self._agreed.wrong_at and self._losses is not None:
            wrong = self._losses.judge()
            if wrong is not None:
                self.notices.append(wrong)
                self._agreed.wrong_at = self._optimizer.steps
