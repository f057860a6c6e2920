"""Where records live: stripes and their members on slots, how ids are routed there, and how a member is repaired."""
