"""The demonstration: trains on click logs while processes are killed, and compares."""
