"""Starting jobs: on this machine, over hosts, or through a cluster's scheduler.

- `commands.py` is `hvdtrain launch` and `hvdtrain stop`, `status.py` is `hvdtrain status`,
  `testbed.py` is `hvdtrain hosts`.
- `prepare.py` turns a training job's options into a `LaunchCommand`. `recipe.py` expands a recipe
  of `launchers/` for it, and `filling.py` fills in the recipe's placeholders.
- `processes.py` starts a job's processes and ends them. If all are on this machine, they are in a
  private network (`private_network.py`). `supervise.py` runs a job to its end, with retries.
  `records.py` knows which job a run folder has.
- `on_ray.py` is a starter of ranks, as mpirun is, that launchers/ray.toml runs.
- `job_log.py` reads a job's log: which rank failed, and why.
- `hosts.py` reads host lists and runs commands on hosts, `copies.py` copies code there.
- `preflight.py` checks hosts before a job starts. It runs `probe.py` on each, which measures the
  network too. `memory.py` estimates the memory of a rank.
- `testbed.py` makes virtual hosts on this machine, to try all this on.
"""
