"""The parameter server: flat weights, cut over servers into buckets, which travel over torch.distributed.rpc or ZeroMQ.

A gradient's way: `buckets.bucketer` (a parameter's gradient is ready, and completes a bucket) → `exchange` (its `Lane`
makes a Push) → a Wire (`wire`: by `rpc`, or by `zeromq`, which has `packing` and `sockets`; `requests` answers there) →
`server` (the handle) → `bucket` with its mode's policy → an Answer, back the same way. `worker` is what a mode does
with it.

`serve` is a server's life; `leases` says who trains on which share of the epoch, `membership` knows who is there and
lets others in, `worker_monitor` watches them, `group` is the workers' sums over them; `joining` is how one joins, who
finds the job by `join_info`; `crash_memory` is what outlives a server that is killed; `membership_log` writes down who
came and went, `ledger` what was applied, `server_metrics` what a server counts, `push_trace` what a worker records of
its pushes; `shared` is a tensor's way to a process of the same host, `messages` what both ends know.
"""
