"""What a run notes of itself, for others to read."""
