"""Makes a user's training loop go on exactly after a restart. It knows nothing of sharded tables."""
