"""The files that ranks write into a run folder: manifest, metrics, snapshots and traces."""
