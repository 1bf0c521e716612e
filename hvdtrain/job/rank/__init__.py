"""One rank of a job, from its options to its exit code."""
