"""A brain for each run: the tuner's search, driven by reports of an agent in the training process.

`Registry` keeps the brains, `api.router` is their HTTP interface, and `service.Runs` hosts both in the daemon.
"""
