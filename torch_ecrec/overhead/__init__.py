"""What failures, and guards against them, cost a cluster: formulas, and how they are shown. See `torch-ecrec plan`."""
