"""Flat vectors, optimizers, precision, codecs and timing, which know nothing of other processes."""
