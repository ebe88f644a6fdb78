"""What is made of profile documents: an HTML page, a trace for Perfetto, the comparison of two."""
