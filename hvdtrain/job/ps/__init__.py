"""The parameter server: flat weights, cut over servers into buckets, and both ends of their way.

A gradient's way: `buckets.exchange` (a parameter's gradient is ready, and completes a bucket) →
`push_exchange` (its `PushLane` makes a Push) → the wire → `server` → `bucket` with its mode's policy →
FreshWeights, back the same way. `worker` is what a mode does on a worker, `push_trace` what --trace
shows of pushes.

A server's state has parts, which are plain: a message in, answers out. `bucket` has weights;
`leases` and `roster` are in `coordination`. `server` has what peers can call: it locks a part, has
it handle the message, has `journal` write down what came of that (for the ledgers, and in
`crash_memory`, which outlives a server that is killed), sends the answers, and has `server_metrics`
count. `serve` is a server's life, and `worker_monitor` watches the workers.
"""
