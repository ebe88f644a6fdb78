"""What trains under DeepSpeed, what is refused, and what goes wrong: a cell for each combination."""
