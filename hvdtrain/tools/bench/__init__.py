"""`hvdtrain bench`: times all-reduces, pushes and pulls over message sizes, side by side.

`command.py` starts a job for each backend and shows the figures; `turns.py` has one backend measure
at a time; `ranks.py` is the operation of a rank in its turn.
"""
