"""Scripts as a user writes them. Each runs alone, under torchrun."""
