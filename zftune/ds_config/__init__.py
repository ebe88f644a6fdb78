"""What a ds_config is: reading and editing it, and what DeepSpeed's versions make of it. DeepSpeed is not needed."""
