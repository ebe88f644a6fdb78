"""What public training scripts do to weights beside training them, each in a few lines as people write them."""
