"""Checkpoints outside of the cluster: how they are written, found, checked and read. See docs/storage.md."""
