"""The run folder: claiming it, and what is in it: manifest, metrics, snapshots."""
