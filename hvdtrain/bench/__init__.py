"""`hvdtrain bench`: seconds of an all-reduce, or of a push and pull, over sizes of message, side by side with peers.

`command.py` starts the ranks and shows what they measured; `ranks.py` is what each rank runs; `mxnet_peer.py` runs in
an environment of its own.
"""
