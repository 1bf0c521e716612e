"""Who is in a job, and what they agree on. A `job` is what a rank knows of it; its ranks have a `meeting` first. A
`synchroniser` is what a mode does for one worker.

Workers agree in a `group`: `store_group` where none may be lost, or `server_group`, whose sums the first server has.
That server has two parts, plain state that takes a message and returns an Outcome: `roster` knows who is there, lets
others in and adds up, `leases` says who trains on which share of the epoch. A worker finds by `join_info` a job that
runs, and joins it by `joining`; `membership_log` writes down who came and went.
"""
