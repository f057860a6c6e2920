"""The processes of a cluster, and how they start and end."""
