"""What a process needs of the system it runs on: files, memory, limits, signals, its terminal. It knows no jobs."""
