"""Settings and their order, the model and its text, how a setting is run, and what the runs say."""
