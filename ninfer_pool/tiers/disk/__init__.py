"""The disk tier's format: whole entries in a folder, written once, verified whenever read."""
