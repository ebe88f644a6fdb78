"""The daemon: one process a machine that keeps any number of training runs tuned.

`client/http.py` needs nothing but the standard library. The messages of trainings (`protocol/`) are the tuner's own
dataclasses, checked by pydantic. What serves (FastAPI, uvicorn, Prometheus) is imported by `zftune daemon start` alone.
"""

PROTOCOL = 7
"""The version that client and server have to share; it is in every answer's header."""

PROTOCOL_HEADER = "zftune-protocol"

SHOWN = 8
"""Characters of a run's identity that are enough to name it."""
