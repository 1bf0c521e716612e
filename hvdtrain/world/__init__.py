"""Where this process is: its place in its job, its host, its network."""
