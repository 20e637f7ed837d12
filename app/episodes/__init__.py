"""Episodes of agents: create them, end them with an outcome, read them."""
