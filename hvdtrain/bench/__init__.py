"""`hvdtrain bench`: seconds of an all-reduce, or of a push and pull, over sizes of message, side by side.

`command.py` starts a job for each backend and shows what they measured; `turns.py` has them measure one at a time;
`ranks.py` is what a rank does in its turn.
"""
