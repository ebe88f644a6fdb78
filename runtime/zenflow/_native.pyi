"""The native part of zenflow (csrc/)."""

def bandwidth(
    *, elements: int, update_interval: int, gradient_bytes: int, repeats: int, cpus: list[int]
) -> tuple[list[float], int]:
    """Seconds of each timed pass over the streams of a host update, and a checksum of the memory."""
