"""Says something as it is loaded, to a standard output that keeps it for a while."""

print("loaded")
