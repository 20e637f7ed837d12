"""The front of house: speaks HTTP and owns the database; never computes a gradient."""
