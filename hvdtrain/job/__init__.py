"""What the ranks of a job do, from a process to its messages."""
