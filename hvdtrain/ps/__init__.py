"""The parameter server: flat weights, cut over servers into buckets, and both ends of their way.

A gradient's way: `buckets.exchange` (a parameter's gradient is ready, and completes a bucket) → `exchange` (its
`PushLane` makes a Push) → the wire → `desk` → `bucket` with its mode's policy → an Answer, back the same way.
`worker` is what a mode does, `push_trace` what --trace is told of its pushes.

A server has parts, which are plain state: a message in, an Outcome out: `bucket` has weights; `leases` and `roster` are
in `coordination`. The `desk` is what peers can call; it locks a part, has `journal` write down what came of a message
(for the ledgers, and in `crash_memory`, which outlives a server that is killed), answers, and has `server_metrics`
count. `serve` is a server's life, and `worker_monitor` watches the workers.
"""
