"""A reward that asks another model."""
