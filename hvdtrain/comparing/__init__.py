"""`hvdtrain compare`: a grid of runs, one after the other, and a report."""
