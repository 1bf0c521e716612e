"""Arithmetic on tensors that knows nothing of processes: flat vectors, optimizers, precision, codecs, timing."""
