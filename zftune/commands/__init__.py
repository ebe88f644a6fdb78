"""What the command line does, a module for each command; `zftune.cli` puts them together."""
