"""The parameter server: flat weights, cut over servers into buckets, which travel over torch.distributed.rpc or ZeroMQ.

A gradient's way: `worker` (a parameter's gradient is ready) → `exchange` (a bucket is complete: a Push) → `wire` (over
`rpc` or `zeromq`, which has `packing` and `sockets`; `requests` answers there) → `desk` → `bucket` with its mode's
policy → an Answer, back the same way.

A server has parts, which are plain state: a message in, an Outcome out. `bucket` has weights, `leases` says who trains
on which share of the epoch, `roster` knows who is there, lets others in and has their sums. The `desk` is what peers
can call; it locks a part, has `journal` write down what came of a message (for the ledgers, and in `crash_memory`,
which outlives a server that is killed), answers, and has `server_metrics` count. `serve` is a server's life, and
`worker_monitor` watches the workers.

`group` is the workers' sums; `joining` is how one joins, who finds the job by `join_info`; `membership_log` writes down
who came and went; `partition` cuts, `staging` is a gradient's way off a GPU and back, `shared` a tensor's to a process
of the same host, `messages` what both ends know.
"""
