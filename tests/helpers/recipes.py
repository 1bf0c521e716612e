"""What recipes of launchers make of a job of four ranks."""

from hvdtrain.base.config import recipes
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.recipe import JobSpec, expand

HOSTS = (Host("node1", 2), Host("node2", 2))
TAKE_HOSTS = ("mpi", "slurm", "srun", "ssh")
# whose words are not filled in
PROGRAM = [
    "python",
    "-m",
    "hvdtrain",
    "train",
    "--out",
    "a b {ranks}",
]


def start(launcher, out, hosts=None, **more):
    hosts = (HOSTS if launcher in TAKE_HOSTS else ()) if hosts is None else hosts
    return expand(
        recipes.launcher(launcher), JobSpec(4, PROGRAM, servers=1, hosts=hosts, out=out, **more)
    )


def script(launcher, out, hosts=None, **more):
    made = start(launcher, out, hosts, **more)
    [path] = [path for path in made.files if path.name.startswith(("job.", "mpijob.", "service."))]
    assert made.argv[-1] in (str(path), f"--filename={path}")
    return made.argv, made.files[path]
