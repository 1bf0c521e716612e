"""The parameter server: flat weights cut over the servers, pushed to and pulled from over torch.distributed.rpc.

A server (`server.py`) is a shard of the weights, its optimizer and a policy that says when a push is applied;
the policies live with their modes. `client.py` is the worker's side, `rpc.py` the only module that knows about rpc.
"""
