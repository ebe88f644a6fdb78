"""Study 020's prediction on numbers worked out by hand, and what it says where it cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.studies.test_studies import STUDIES, load

ALONE = {
    "FSDP2": {"forward_s": 0.01, "backward_s": 0.02, "step_s": 0.04},
    "published": {"forward_s": 0.01, "backward_s": 0.02, "step_s": 0.05},
}


@pytest.fixture(scope="module")
def study() -> Any:
    return load(STUDIES / "020-two-hosts" / "run.py")


def test_on_a_fast_network_a_step_is_compute_and_half_of_the_optimizer(study: Any) -> None:
    assert study.predicted_s(study.QUICK, "FSDP2", ALONE, 1e6) == pytest.approx(0.035, rel=1e-2)
    assert study.predicted_s(study.QUICK, "published", ALONE, 1e6) == pytest.approx(0.04, rel=1e-2)


def test_on_a_slow_one_it_is_what_goes_over_it(study: Any) -> None:
    """Each rank sends half of the weights for forward and for backward, and half of the gradients twice (gloo)."""
    model = study.workload_of(study.QUICK.hidden, study.QUICK.layers).module
    sent_bytes = 4 * 4 * sum(parameter.numel() for parameter in model.parameters()) / 2
    found = study.predicted_s(study.QUICK, "FSDP2", ALONE, 1e-3)
    assert found == pytest.approx(sent_bytes / 1e6, rel=0.1)
    assert study.predicted_bytes(study.QUICK, "FSDP2", ALONE) == pytest.approx(sent_bytes, rel=0.1)


def test_turns_are_told_by_their_medians(study: Any) -> None:
    turns = [dict.fromkeys(study.FIGURES, value) for value in (3.0, 1.0, 2.0)]
    assert study.medians(turns) == {**dict.fromkeys(study.FIGURES, 2.0), "between_s": [1.0, 3.0]}


def test_a_machine_that_cannot_be_two_hosts(
    study: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert study.main(["--quick"]) == 2
    assert (
        capsys.readouterr().err == "020-two-hosts: ip and tc: not installed; the study needs a machine with iproute2\n"
    )
