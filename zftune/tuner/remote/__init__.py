"""A search that is thought about in the daemon: the training process measures, and asks what to do.

`RemoteDesk` is what the training thread has of it, `Courier` the thread that talks to the daemon, and `DaemonCounsel`
what a tuner holds. The training never waits for them: where the daemon is away, slow, or speaks nonsense, the
incumbent's knobs stay.
"""
