"""Run folders: who may write in one, the types of its files, and runs as values to compare."""
