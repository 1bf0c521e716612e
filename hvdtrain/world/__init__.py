"""Where this process is in its job, and with whom: rank and sizes, finding each other, ending together."""
