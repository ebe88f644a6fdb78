"""What is made of profile documents: an HTML page, a trace for Perfetto, a comparison; of searches: a study."""
