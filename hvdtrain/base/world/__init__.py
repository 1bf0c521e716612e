"""The place of this process: in its job, on its host, in its network."""
