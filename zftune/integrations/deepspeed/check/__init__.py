"""`zftune check`: what DeepSpeed, or this package's runtime, makes of a ds_config that its user does not expect."""
