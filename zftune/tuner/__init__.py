"""The search for the fastest knobs."""
