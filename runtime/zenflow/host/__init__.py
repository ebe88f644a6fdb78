"""The host's side of offloading: threads and memory that keep and update the state of the deferred columns."""
