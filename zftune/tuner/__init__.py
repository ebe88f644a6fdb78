"""The search for the fastest knobs. Optuna is imported in here and nowhere else."""
