"""Starting jobs: on this machine, over hosts, or through a cluster's scheduler.

`recipe.py` expands what `launchers/` says, `processes.py` runs it and ends it, `follow.py` sees it to its end and
starts it again, `failure.py` tells why it failed.
`hosts.py` reads host lists, `copies.py` brings code and data there, `preflight.py` asks `probe.py` on each host what it
has, `memory.py` says how much a rank needs, `remote.py` runs a command on a host, `testbed.py` makes hosts to try on.
`commands.py` is `hvdtrain launch` and `hvdtrain stop`, `testbed_command.py` is `hvdtrain hosts`.
"""
