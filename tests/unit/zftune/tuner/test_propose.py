"""What Optuna is asked, and when it is asked no more."""

from __future__ import annotations

from collections import Counter

from zftune.tuner.forecast import Evaluation, Observation, propose
from zftune.tuner.space import Dimension, Setting, Space

START = Setting(topk_ratio=0.1, update_interval=4, apply_lag=4)
SPACE = Space(
    base=START,
    quality="published",
    dimensions=(Dimension("topk_ratio", (0.05, 0.1, 0.2)), Dimension("update_interval", (1, 2, 3, 4))),
    budget=float("inf"),
    coverage=lambda _: 1.0,
)


def test_a_sampler_that_names_one_tried_setting_again_and_again_is_asked_no_more() -> None:
    settings = list(SPACE.settings())
    # The longer the window the faster; the best was tried, and what was not is known to be much slower.
    values = {one: 1.0 - 0.2 * one.update_interval + one.topk_ratio for one in settings}
    tried = [one for one in settings if one.update_interval > 1]
    asked: list[Setting] = []

    def judge(setting: Setting) -> Evaluation:
        asked.append(setting)
        return Evaluation(Observation(setting, values[setting], -1.0), taken=setting in tried)

    told = [Observation(one, values[one], -1.0) for one in tried]
    found = propose(SPACE, told, judge, sampler="gp", seed=0)
    assert found.chosen is not None
    assert found.chosen.told.setting not in tried
    asked = asked[: len(asked) - len(settings)]  # then all of them are looked at
    assert max(Counter(asked).values()) == 4, Counter(asked)
