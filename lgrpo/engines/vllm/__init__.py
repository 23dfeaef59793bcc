"""vLLM in the training process, and how its weights are read back."""
