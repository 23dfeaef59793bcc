"""A run on disk: its folder, its checkpoints, its loggers, and what a resumed run must agree on."""
