"""Starting jobs: on this machine, over hosts, or through a cluster's scheduler.

`recipe.py` expands what `launchers/` says, `processes.py` runs it and ends it, `hosts.py` reads host lists,
`preflight.py` looks at the hosts first, `testbed.py` makes hosts to try it on, `commands.py` is `hvdtrain launch` and
`hvdtrain hosts`.
"""
