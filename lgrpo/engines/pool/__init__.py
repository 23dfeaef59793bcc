"""Several engines on one GPU, each in its own process."""
