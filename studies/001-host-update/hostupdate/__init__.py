"""Study 001: what a window of logged gradients costs on the host."""
