"""The modes, a file for each: see `hvdtrain/base/modes.py`."""
