"""Bytes between processes. `rendezvous` is how ranks find each other, by a store or through `horovod`.

Between workers and servers a `wire` carries calls: by torch's `rpc`, or by `zeromq`, which has `packing` and `sockets`;
`requests` answers them. `messages` are what both ends know, `shared` is a tensor's way to a process of the same host.
"""
