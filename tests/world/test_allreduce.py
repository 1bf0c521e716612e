"""By which algorithm gradients are averaged, where that can be known."""

import pytest

from hvdtrain.world.allreduce import UNKNOWN, find_algorithm

ALGORITHM = "OMPI_MCA_coll_tuned_allreduce_algorithm"
DYNAMIC = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1"}


@pytest.mark.parametrize(
    ("backend", "env", "name", "evidence"),
    [
        ("gloo", {}, "ring", "Gloo's own choice"),
        ("horovod-gloo", {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}, "ring", "Gloo's own choice"),  # which NCCL alone has
        ("horovod-mpi", {}, UNKNOWN, "is not set"),
        ("horovod-mpi", {ALGORITHM: "4"}, UNKNOWN, "counts for nothing without"),
        ("horovod-mpi", {ALGORITHM: "4"} | DYNAMIC, "ring", f"{ALGORITHM}=4"),
        ("horovod-mpi", {ALGORITHM: "rabenseifner"} | DYNAMIC, "rabenseifner", ALGORITHM),
        ("horovod-mpi", {ALGORITHM: "0"} | DYNAMIC, UNKNOWN, f"{ALGORITHM}=0 forces none"),
        ("horovod-nccl", {}, UNKNOWN, "NCCL chooses"),
        ("horovod-nccl", {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}, "hierarchical", "HOROVOD_HIERARCHICAL_ALLREDUCE=1"),
        ("horovod-nccl", {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0", "NCCL_ALGO": "Tree"}, "tree", "NCCL_ALGO=Tree"),
        ("horovod-nccl", {"HOROVOD_AUTOTUNE": "1", "NCCL_ALGO": "Tree"}, UNKNOWN, "HOROVOD_AUTOTUNE"),
        ("cpu:gloo,cuda:nccl", {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL128"}, "ring over ll128", "NCCL_PROTO=LL128"),
        ("cpu:gloo,cuda:nccl", {"NCCL_ALGO": "^Tree"}, UNKNOWN, "NCCL_ALGO=^Tree"),
    ],
)
def test_what_is_known_is_told_with_its_evidence(backend, env, name, evidence):
    found = find_algorithm(backend, 1, env)
    assert found.name == name and evidence in found.evidence


def test_over_several_hosts_open_mpi_takes_another_component_first():
    assert find_algorithm("horovod-mpi", 2, {ALGORITHM: "4"} | DYNAMIC).name == UNKNOWN
    assert find_algorithm("gloo", 2, {}).name == "ring"


@pytest.mark.parametrize("backend", ["none", "rpc", "zmq"])
def test_servers_need_none(backend):
    assert find_algorithm(backend, 1, {}) is None
