"""Checks of the arithmetic: `verify` compares modes, `replay` repeats a recorded run to the bit."""
