"""The parameter server: flat weights cut over servers into buckets, which travel over torch.distributed.rpc.

`plan.py` cuts; `server.py` is one bucket with its optimizer; the policies that say when a push is applied live with
their modes. `exchange.py` is a worker's buckets on their way, `client.py` both ends' lives, `ledger.py` what a server
writes down, `rpc.py` the only module that knows about rpc.
"""
