"""Bytes between processes.

Ranks find each other by a `rendezvous`, with a store or through `horovod`; a `heartbeat` in that
store says that a rank is alive. `descriptors` counts what a rank has open.

Between workers and servers a `wire` carries calls: by torch's `rpc`, or by `zeromq`, which has
`packing` and `sockets`; `requests` answers them. `noise` and `envelope` encrypt what ZeroMQ carries.
`messages` are what both ends know. `shared` passes tensors between processes of one host.
"""
