"""What every other room stands on. It knows nothing of jobs, runs and data."""
