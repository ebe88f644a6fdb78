"""What is to be known of upstream's ZenFlow whatever its settings are: one note for each thing."""

from __future__ import annotations

from collections.abc import Iterator

from zftune.check.findings import Finding
from zftune.check.subject import OURS, ZENFLOW, Rule, Subject

_COUNTS_IN_FLOATS = (0, 19, 6)  # the last one


def checkpoints(subject: Subject) -> Iterator[Finding]:
    """Study 002 `resume`, `resume_reverts`, `export_transposed`; stage 3 from reading upstream's code."""
    if subject.zenflow is not None:
        reason = (
            "Checkpoints lack the selected columns' state: a resumed run is another run. zero_to_fp32 writes "
            "transposed weights."
        )
        yield subject.finding("zenflow-checkpoints", ZENFLOW, "note", reason)


def model(subject: Subject) -> Iterator[Finding]:
    """Study 002 `convolution`, `unused_parameter`, `group_settings`."""
    if subject.zenflow is not None:
        reason = (
            "The run ends at a weight of more than two dimensions and at a parameter without gradient. Settings of "
            "parameter groups, but for the learning rate, do not reach selected columns."
        )
        yield subject.finding("zenflow-model", ZENFLOW, "note", reason)


def selection(subject: Subject) -> Iterator[Finding]:
    """Its walk through a bucket leaves out weights of one dimension, their gradients do not."""
    if subject.flattens:
        reason = (
            "Weights of one dimension, biases and norms, shift the sums that columns are selected by: behind them in a "
            "bucket other columns are selected than those with the largest gradients."
        )
        yield subject.finding("zenflow-selection", ZENFLOW, "note", reason)


def ranks(subject: Subject) -> Iterator[Finding]:
    """The border is `len(flat) / ranks`, a float, and so is the part of a weight before it."""
    if subject.flattens and subject.release <= _COUNTS_IN_FLOATS:
        reason = (
            "On two ranks or more the run may end with a TypeError in the first step: it does where the border between "
            "two ranks' shares lies within a weight of one dimension."
        )
        yield subject.finding("zenflow-ranks", ZENFLOW, "note", reason)


def mean(subject: Subject) -> Iterator[Finding]:
    """Study 002 `window_mean`, which is the paper's design, and `micro_step_correction`."""
    if subject.zenflow is not None and (subject.update_interval or 0) > 1:
        reason = (
            "The host makes one update a window, of the mean gradient, and its bias correction counts backward passes: "
            "the first updates are shorter."
        )
        yield subject.finding("zenflow-mean", f"{ZENFLOW}.update_interval", "note", reason)


def overlap(subject: Subject) -> Iterator[Finding]:
    """Study 002 `two_momenta`, `worker_death`, `destroy_leaks`; cores from reading upstream's code."""
    if subject.zenflow is not None and subject.zenflow["overlap_step"] is True:
        reason = (
            "Overlapped, there are two sets of moments, each of every other window. A dead worker is noticed after "
            "60 s, and destroy() leaves worker and cores behind. On several nodes cores are split wrongly."
        )
        yield subject.finding("zenflow-overlap", f"{ZENFLOW}.overlap_step", "note", reason)


def offload(subject: Subject) -> Iterator[Finding]:
    """The runtime of `zftune run` keeps that state on the GPU."""
    if subject.zenflow is not None and subject.zenflow["offload"] is True:
        reason = "The runtime of zftune run does without it: the selected columns' state stays on the GPU."
        yield subject.finding("own-offload", f"{ZENFLOW}.offload", "note", reason, backends=OURS)


RULES: tuple[Rule, ...] = (checkpoints, model, selection, ranks, mean, overlap, offload)
