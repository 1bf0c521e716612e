"""What measures, checks and tests: each of them a command."""
