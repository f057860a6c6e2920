"""The trainers' side of the servers: lookups, pushes, loads."""
