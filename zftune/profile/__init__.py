"""Profiling: measuring, the document, its verdict and its screen."""
