"""The members of a job, and what they agree on.

A `job` is what a rank knows of its job; the ranks have a `meeting` before they prepare. A
`synchroniser` is what a mode does for one worker.

Workers agree in a `group`: a `store_group` where none may be lost, or a `server_group`, whose sums
the first server adds up. That server has two parts, plain state that takes a message and returns
the answers: `roster` knows who is there, lets others in and adds up; `leases` knows who trains on
which share of the epoch. `joining` is how a worker joins a job that runs.
"""
