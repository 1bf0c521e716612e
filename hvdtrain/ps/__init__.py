"""The parameter server: flat weights, cut over servers into buckets, which travel over torch's rpc or ZeroMQ.

A gradient's way: `buckets.bucketer` (a parameter's gradient is ready, and completes a bucket) → `exchange` (its `Lane`
makes a Push) → a Wire (`wire`: by `rpc`, or by `zeromq`, which has `packing` and `sockets`; `requests` answers there) →
`desk` → `bucket` with its mode's policy → an Answer, back the same way. `worker` is what a mode does.

A server has parts, which are plain state: a message in, an Outcome out. `bucket` has weights, `leases` says who trains
on which share of the epoch, `roster` knows who is there, lets others in and has their sums. The `desk` is what peers
can call; it locks a part, has `journal` write down what came of a message (for the ledgers, and in `crash_memory`,
which outlives a server that is killed), answers, and has `server_metrics` count. `serve` is a server's life, and
`worker_monitor` watches the workers.

`group` is the workers' sums; `joining` is how one joins, who finds the job by `join_info`; `membership_log` writes down
who came and went; `push_trace` is what a worker records of its pushes; `shared` is a tensor's way to a process of the
same host, `messages` what both ends know.
"""
