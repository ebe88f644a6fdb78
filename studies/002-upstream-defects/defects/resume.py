"""A checkpoint has neither the selected columns' moments nor the selection, the accumulator or the step count."""

from __future__ import annotations

from defects.case import COLUMNS, Defect, furthest, matrix, random
from defects.checkpoints import SAVED_AFTER, reloaded, reloaded_by_us
from defects.peers import Ours
from defects.upstream import Upstream, settings

LR, STEPS = 1e-2, 12
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 1000, "update_interval": 4}
SETTINGS = settings(ZENFLOW, lr=LR)
OFFLOAD = settings(None, lr=LR)


def upstream(document: dict[str, object]) -> float:
    steps = random(STEPS)
    through = Upstream([matrix()], document).run(steps)[-1][0]
    resumed, _ = reloaded(document, steps)
    return furthest(through, resumed.run(steps[SAVED_AFTER:])[-1][0], LR, range(COLUMNS))


def ours() -> float:
    steps = random(STEPS)
    run = Ours([matrix()], SETTINGS)
    through = run.run(steps)[-1][0]
    run.end()
    resumed, _ = reloaded_by_us(SETTINGS, steps)
    seen = resumed.run(steps[SAVED_AFTER:])[-1][0]
    resumed.end()
    return furthest(through, seen, LR, range(COLUMNS))


DEFECT = Defect(
    title="a resumed run is another run: selective state, accumulator and step count are not saved",
    measure=f"distance of {STEPS} steps with a checkpoint after {SAVED_AFTER} from the same without, in lr",
    settings=SETTINGS,
    expected=lambda: 0.0,
    upstream=lambda: upstream(SETTINGS),
    ours=ours,
    control=lambda: (upstream(OFFLOAD), 0.0),
    control_is="ZeRO-Offload, the same without the zenflow section",
)
