"""`hvdtrain doctor`: `command.py` lists the checks of `software.py` and `machine.py`.

`findings.py` has the result of a check.
"""
