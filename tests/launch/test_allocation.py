"""The hosts that a cluster has given to a job; those of a real Slurm in test_slurm."""

import pytest

from hvdtrain.base.config import recipes
from hvdtrain.base.errors import UsageError
from hvdtrain.launch import allocation
from hvdtrain.launch.allocation import allocated_cores, allocated_hosts
from hvdtrain.launch.hosts import Host

SRUN, MPI = recipes.launcher("srun"), recipes.launcher("mpi")


@pytest.fixture
def slurm(tmp_path):
    """The environment of an allocation of three nodes; its scontrol answers as Slurm's does."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames node[1-2],n7" ] && printf "node1\\nnode2\\nn7\\n"\n'
    )
    scontrol.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_NODELIST": "node[1-2],n7",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2),4",
        "SLURM_TASKS_PER_NODE": "2(x2),1",
    }


def test_slurms_nodes_have_as_many_slots_as_tasks_were_asked_for(slurm, monkeypatch):
    monkeypatch.setenv("PATH", slurm["PATH"])
    assert allocated_hosts(SRUN, slurm) == [Host("node1", 2), Host("node2", 2), Host("n7", 1)]
    assert allocated_cores(slurm) == {"node1": 8.0, "node2": 8.0, "n7": 4.0}
    del slurm["SLURM_TASKS_PER_NODE"]
    assert [host.slots for host in allocated_hosts(SRUN, slurm)] == [8, 8, 4]


@pytest.mark.parametrize("tasks", ["1", "1(x3)", "2,1"])
def test_a_step_has_its_own_tasks_in_place_of_the_allocations(tasks, slurm, monkeypatch):
    """As in the shell of `srun --pty bash`: what the allocation has of cores is left."""
    monkeypatch.setenv("PATH", slurm["PATH"])
    step = slurm | {
        "SLURM_STEP_ID": "0",
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }
    assert [host.slots for host in allocated_hosts(SRUN, step)] == [8, 8, 4]
    assert [host.slots for host in allocated_hosts(SRUN, step | {"SLURM_CPUS_PER_TASK": "5"})] == [
        1,
        1,
        1,
    ]
    interactive = slurm | {"SLURM_STEP_ID": "4294967290"}  # salloc's shell, where that is a step
    assert [host.slots for host in allocated_hosts(SRUN, interactive)] == [2, 2, 1]


def test_outside_an_allocation_it_is_one_line(slurm, monkeypatch):
    with pytest.raises(
        UsageError,
        match="^--launcher srun is for use inside a Slurm allocation: start this in salloc",
    ):
        allocated_hosts(SRUN, {})
    monkeypatch.setenv("PATH", slurm["PATH"])
    with pytest.raises(UsageError, match="scontrol does not say which nodes this allocation has"):
        allocated_hosts(SRUN, slurm | {"SLURM_JOB_NODELIST": "other"})


def test_in_the_launcher_pod_of_an_mpi_job_its_host_file_names_the_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(allocation, "POD_HOSTFILE", tmp_path / "hostfile")
    assert allocated_hosts(MPI, {}) == []
    (tmp_path / "hostfile").write_text(
        "job-worker-0.job.default.svc slots=2\njob-worker-1.job.default.svc slots=2\n"
    )
    workers = [Host(f"job-worker-{n}.job.default.svc", 2) for n in range(2)]
    assert allocated_hosts(MPI, {}) == workers
    assert (
        allocated_hosts(recipes.launcher("ssh"), {})
        == allocated_hosts(recipes.launcher("local"), {})
        == []
    )
