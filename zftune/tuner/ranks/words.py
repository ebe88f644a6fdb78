"""What the ranks say to each other after a step: bytes of a fixed number, each written by one rank alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MOST_TALK_BYTES = 2048
"""Two settings as JSON take some 500."""
_WORD = struct.Struct("<4q")
_LENGTH = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Word:
    """What every rank says."""

    step: int
    """That was just taken."""
    acknowledged: int = 0
    """Number of the proposal that it is ready for; 0: none."""
    leaves: bool = False
    """Whether nothing is to be tuned any more; its last word."""
    wrong_at: int = 0
    """Step at which its loss showed that training goes wrong; 0: it does not."""


@dataclass(frozen=True, slots=True)
class Talk:
    """What rank 0 says besides."""

    number: int = 0
    """Of its newest proposal."""
    knobs: Mapping[str, Any] | None = None
    """The proposal, where it is new."""
    keeps: Mapping[str, Any] | None = None
    """Knobs to be left with at the end; None: as they are."""


@dataclass(frozen=True, slots=True)
class Round:
    """What all have said after a step."""

    words: Sequence[Word]
    """By rank."""
    talk: Talk


def room(ranks: int) -> torch.Tensor:
    """For what all say, uint8: with `fill` each rank writes its own part, and the bytes' maxima are everybody's.

    Args:
        ranks: their number.
    """
    return torch.zeros(ranks * _WORD.size + MOST_TALK_BYTES, dtype=torch.uint8)


def fill(room: torch.Tensor, rank: int, word: Word, talk: Talk | None = None) -> None:
    """Write a rank's part.

    Args:
        room: zeros.
        rank: that says it.
        word: of the rank.
        talk: of rank 0; None: of another rank.

    Raises:
        ValueError: it is too long.
    """
    whole = room.numpy().data
    _WORD.pack_into(whole, rank * _WORD.size, word.step, word.acknowledged, word.leaves, word.wrong_at)
    if talk is None:
        return
    text = json.dumps([talk.number, talk.knobs, talk.keeps]).encode()
    begin = len(whole) - MOST_TALK_BYTES
    if len(text) > MOST_TALK_BYTES - _LENGTH.size:
        raise ValueError(f"a proposal has {len(text)} bytes, allowed are {MOST_TALK_BYTES - _LENGTH.size}")
    _LENGTH.pack_into(whole, begin, len(text))
    whole[begin + _LENGTH.size : begin + _LENGTH.size + len(text)] = text


def read(room: torch.Tensor) -> Round:
    """What all have said.

    Args:
        room: as everybody has filled it.
    """
    whole = room.numpy().data
    begin = len(whole) - MOST_TALK_BYTES
    words = [
        Word(step, acknowledged, bool(leaves), wrong_at)
        for step, acknowledged, leaves, wrong_at in _WORD.iter_unpack(whole[:begin])
    ]
    (length,) = _LENGTH.unpack_from(whole, begin)
    number, knobs, keeps = json.loads(bytes(whole[begin + _LENGTH.size : begin + _LENGTH.size + length]))
    return Round(words, Talk(number, knobs, keeps))
