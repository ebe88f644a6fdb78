"""`zftune top`: the runs that the daemon tunes, on a terminal. All text of a run is shown as text."""
