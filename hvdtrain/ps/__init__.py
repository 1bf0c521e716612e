"""The parameter server: flat weights, cut over servers into buckets, which travel over torch.distributed.rpc or ZeroMQ.

A gradient's way: `worker` (a parameter's gradient is ready) → `exchange` (a bucket is complete: a Push) → `wire` (over
`rpc` or `zeromq`, which has `packing` and `sockets`; `requests` answers there) → `server` (the handle) → `bucket` with
its mode's policy → an Answer, back the same way. `serve` is a server's life; `leases` says who trains on which share of
the epoch, `membership` knows who is there and lets others in, `worker_monitor` watches them, `group` is the workers'
sums over them; `joining` is how one joins, who finds the job by `join_info`; `crash_memory` is what outlives a server
that is killed; `membership_log` writes down who came and went, `ledger` what was applied, `server_metrics` what a
server counts; `partition` cuts, `staging` is a gradient's way off a GPU and back, `shared` a tensor's to a process of
the same host, `messages` what both ends know.
"""
