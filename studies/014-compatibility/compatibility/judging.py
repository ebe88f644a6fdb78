"""What a cell's figures say: it trains, is refused, goes wrong or fails; and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from compatibility.cells import Cell
from compatibility.scripts import LIMIT_S, OVERLAPPED

Word = Literal["trains", "refused", "wrong", "fails"]
WORDS: tuple[Word, ...] = get_args(Word)
"""From good to bad."""
LOSS = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
"""How far a loss may be from AdamW's, relative."""
APART = {"fp32": 1e-2, "bf16": 5e-2, "fp16": 5e-2}
"""How far a weight may be from AdamW's, as a share of how far AdamW moved it."""
READ = 1e-5
"""How far an element that an idiom reads may be from what it reads with torch alone, or with the reference."""
SCRIPTS = 2e-2
"""How far a loss that a script prints may be from that without zftune, relative."""
FALL = 0.1
"""What deferred updates must reach of AdamW's fall of the loss."""
_NOTE = 150


@dataclass(frozen=True, slots=True)
class Verdict:
    """A word, and what there is to say."""

    word: Word
    note: str = ""


def verdict(cell: Cell, figures: Mapping[str, Any]) -> Verdict:
    """Judge a cell.

    Args:
        cell: that was tried.
        figures: the worker's.
    """
    if "tries" in figures:
        return _worst([verdict(cell, one) for one in figures["tries"]])
    error = figures.get("error", figures.get("ended"))
    if error is not None:
        kind, _, sentence = str(error).partition(": ")
        if kind == "BadInputError":
            return Verdict("refused", sentence)
        return Verdict("fails", _shortened(" ".join(str(error).split())))
    if cell.setting:
        return _idiom_verdict(figures["off"])
    step, apart = figures["not_finite_from"], figures["apart"]
    if step is not None:
        return Verdict("wrong", f"the loss is not finite from step {step} on")
    if cell.windowed:
        if figures["first_off"] > LOSS[cell.dtype]:
            return Verdict("wrong", f"the first loss is {_percent(figures['first_off'])} off the model's")
        return Verdict("trains" if figures["fall"] >= FALL else "wrong", _about_fall(figures["fall"]))
    if figures["off"] > LOSS[cell.dtype]:
        return Verdict("wrong", f"the loss is up to {_percent(figures['off'])} off AdamW's")
    if apart is None or apart > APART[cell.dtype]:
        return Verdict("wrong", _about_weights(apart))
    if figures["skipped"] != figures["expected_skipped"]:
        return Verdict("wrong", f"{figures['skipped']} steps are skipped, not {figures['expected_skipped']}")
    share = 1 / cell.ranks if cell.config["zero_optimization"]["stage"] == 3 else 1.0
    if figures["held"] > share:
        return Verdict("wrong", f"a rank has {_percent(figures['held'])} of the weights, not {_percent(share)}")
    return Verdict("trains", _remarks(figures))


def _worst(found: Sequence[Verdict]) -> Verdict:
    """Of several tries, with how many went as badly."""
    worst = max(found, key=lambda one: WORDS.index(one.word))
    times = sum(one.word == worst.word for one in found)
    often = f"{times} of {len(found)} tries"
    if worst.word in ("trains", "refused") and times == len(found):
        return worst
    return Verdict(worst.word, f"{often}: {worst.note}")


def _idiom_verdict(off: float | None) -> Verdict:
    if off is None:
        return Verdict("wrong", "what the script reads is not finite")
    share = float(f"{100 * off:.1g}")
    return Verdict("trains") if off <= READ else Verdict("wrong", f"what the script reads is off by {share:g}%")


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.0f}%"


def _about_weights(apart: float | None) -> str:
    if apart is None:
        return "weights are not finite"
    if 0.99 < apart < 1.01:
        return "a weight that AdamW moves stays where it was"
    return f"a weight is off by {_percent(apart)} of the way that AdamW moves it"


def _about_fall(fall: float) -> str:
    return f"the loss falls by {_percent(fall)} of AdamW's fall"


def _remarks(figures: Mapping[str, Any]) -> str:
    said = []
    if figures["unused_moved"]:
        said.append("weight decay reaches the unused parameter; torch's AdamW leaves it alone")
    if figures["bitwise"] is not None:
        said.append("resumed bitwise" if figures["bitwise"] else "resumed within rounding, not bitwise")
    return "; ".join(said)


def _shortened(text: str) -> str:
    return text if len(text) <= _NOTE else text[:_NOTE].rsplit(" ", 1)[0] + " ..."


def script_verdict(name: str, figures: Mapping[str, Any], plain: Mapping[str, Any]) -> Verdict:
    """Whether a script trains: to its end, with a loss that falls, as it does without zftune.

    Args:
        name: of the script.
        figures: of one side.
        plain: of DeepSpeed without zftune; where that has no losses, nothing is compared with it.
    """
    status, losses, said = figures["status"], figures["losses"], " ".join(figures["said"][-1:])
    if status == 2 and "zftune: " in said:
        return Verdict("refused", said.partition("zftune: ")[2])
    if status != 0:
        ended = f"no end within {LIMIT_S:.0f} s" if status is None else f"exit status {status}"
        return Verdict("fails", f"{ended}: {said}"[:_NOTE])
    if len(losses) < 2 or not losses[-1] < losses[0]:
        return Verdict("wrong", f"the loss does not fall: {losses}")
    if name == OVERLAPPED or len(plain["losses"]) != len(losses):
        return Verdict("trains")
    off = max(abs(loss - other) / other for loss, other in zip(losses, plain["losses"], strict=True))
    if off > SCRIPTS:
        return Verdict("wrong", f"the loss is up to {100 * off:.2g}% off that without zftune")
    return Verdict("trains")
