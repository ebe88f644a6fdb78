"""What a profile trains: a causal language model, real text, and batches of it.

    workload = build_model("tiny", dtype=torch.bfloat16, seed=0)
    corpus = load_text(None)
    feed = batches(workload.encode(corpus), micro_batch=1, sequence=64, seed=0)
    loss = workload.loss(next(feed))

Only a model directory needs transformers, which `build_model` imports then.
"""

from zftune.workload.model import MODEL_SIZES, Workload, build_model
from zftune.workload.text import Batch, ByteTokenizer, TextCorpus, Tokenizer, batches, load_text

__all__ = [
    "MODEL_SIZES",
    "Batch",
    "ByteTokenizer",
    "TextCorpus",
    "Tokenizer",
    "Workload",
    "batches",
    "build_model",
    "load_text",
]
