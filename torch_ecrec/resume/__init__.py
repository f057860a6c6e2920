"""What makes a user's training loop go on exactly after a restart. It knows nothing of tables that are sharded."""
