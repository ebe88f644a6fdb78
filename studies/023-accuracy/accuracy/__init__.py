"""Tasks of real text, the models that are fine-tuned on them, the variants of the optimizer, and what the runs say."""
