"""What a tuned run did, why, what that cost and what it won: told from the store's rows alone."""
