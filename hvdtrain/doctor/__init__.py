"""`hvdtrain doctor`: `command.py` lists the checks; `software.py` and `machine.py` have them.

`findings.py` is what a check returns.
"""
