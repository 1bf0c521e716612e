"""Tests of a saved model: `predictions.py` computes, `files.py` writes, `command.py` is the command."""
