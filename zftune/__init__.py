"""Profile and tune offloaded training: where the GPU's time goes, and the knobs that win it back."""

__version__ = "0.1.0"
