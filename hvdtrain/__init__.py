"""Ring all-reduce or a parameter server, on evidence."""
