"""Files, memory, limits, signals and the terminal of a process. It knows no jobs."""
