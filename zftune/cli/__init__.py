"""What the command line does, a module for each command; `zftune.cli.main` puts them together."""
