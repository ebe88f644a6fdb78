"""The daemon: one process a machine that keeps any number of training runs tuned.

`client.py` runs inside training processes and needs nothing but the standard library. What serves (FastAPI, uvicorn,
Prometheus) is imported by `zftune daemon` alone.
"""

PROTOCOL = 2
"""The version that client and server have to share; it is in every answer's header."""

PROTOCOL_HEADER = "zftune-protocol"
