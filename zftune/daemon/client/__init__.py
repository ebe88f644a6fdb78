"""A search that is thought about in the daemon: the training process measures, and asks what to do.

`RemoteWorker` is what the training thread has of it, `DaemonSession` the thread that talks to the daemon, and
`DaemonDriver` what a tuner holds. The training never waits for them: where the daemon is away or slow, or its answers
make no sense, the incumbent's knobs stay.
"""
