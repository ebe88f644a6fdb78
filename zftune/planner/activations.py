"""A stated model of what a step keeps on the device for backward: bytes, for a transformer in the style of Llama.

Of each token and layer, as transformers computes it with SDPA (h hidden, w width of key and value, i intermediate,
e bytes an element): each of two norms keeps its input in fp32, its normalised input, and its output (4 + 2e) h;
attention keeps query, key, value, its output, and that as the next product's input, 3e h + 2e w; the gated network
keeps gate, its activation, up, and their product, 4e i. Logits are kept in their own dtype and in fp32, and the loss
adds two more of fp32 while its gradient is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from zftune.planner.facts import Job, ModelFacts


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes on the device."""

    layer: int
    """Kept by one layer's forward until its backward."""
    checkpoint: int
    """Kept of one layer that recomputes."""
    working: int
    """Made and freed within one layer's backward."""
    head: int
    """Kept and made around the logits."""


def activations(model: ModelFacts, job: Job) -> Activations:
    """What one rank keeps."""
    e, h, tokens = model.element_bytes, model.hidden, job.tokens
    wide, narrow = model.intermediate or 4 * h, model.key_value_width or h
    norms = 2 * (4 + 2 * e) * h
    attention = 3 * e * h + 2 * e * narrow + 4 * model.heads
    gated = 4 * e * wide
    working = max(3 * e * wide, 3 * e * h + 8 * h) + 2 * e * h
    return Activations(
        layer=tokens * (norms + attention + gated),
        checkpoint=tokens * e * h,
        working=tokens * working,
        head=tokens * (model.vocabulary * (2 * e + 12) + 3 * e * h),
    )
