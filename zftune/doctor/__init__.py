"""`zftune doctor`: what works on this machine, what is missing, and the fix for each."""
