"""What a run records of itself for others to read."""
