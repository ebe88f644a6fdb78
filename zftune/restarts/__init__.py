"""`zftune tune --restartable -- CMD`: a search over knobs that need a restart, those of upstream's DeepSpeed."""
