"""What an agent and the daemon tell each other: plain data as JSON, checked strictly on both sides.

Standard library only: it is imported inside training processes. `codec` reads and writes any frozen dataclass whose
fields are numbers, texts, tuples, mappings and such dataclasses; `messages` has those that travel.
"""

from zftune.daemon import PROTOCOL
from zftune.daemon.wire.codec import WireError, decode, encode, parse
from zftune.daemon.wire.messages import (
    MOST_BYTES,
    MOST_STEPS,
    Again,
    Applied,
    Directive,
    Done,
    Farewell,
    Goodbye,
    Hello,
    Report,
    StepFigures,
    Welcome,
    masked,
)

__all__ = [
    "MOST_BYTES",
    "MOST_STEPS",
    "PROTOCOL",
    "Again",
    "Applied",
    "Directive",
    "Done",
    "Farewell",
    "Goodbye",
    "Hello",
    "Report",
    "StepFigures",
    "Welcome",
    "WireError",
    "decode",
    "encode",
    "masked",
    "parse",
]
