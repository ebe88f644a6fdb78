"""Whole searches in simulated time, under the noise of real machines."""
