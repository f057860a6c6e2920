"""The cost of failures, and of guards against them, to a cluster: formulas and reports. See `torch-ecrec plan`."""
