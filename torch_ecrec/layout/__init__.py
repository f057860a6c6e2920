"""Where records live: stripes and their members on slots, the way from ids there, and what repairs a member."""
