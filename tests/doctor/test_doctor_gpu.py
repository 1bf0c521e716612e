"""What `hvdtrain doctor` says of GPUs that this machine need not have: told from the facts that the
probe prints.
"""

import pytest

from hvdtrain.tools.doctor import software
from hvdtrain.tools.doctor.findings import MISSING, OK, WARNING

FACTS = {
    "torch": True,
    "gpus": ["NVIDIA H200 (151 GB, sm_90)"] * 2,
    "cuda": "13.2",
    "torch_nccl": [2, 30, 7],
    "Horovod": True,
    "Gloo": True,
    "MPI": True,
    "NCCL": 23007,
}


def test_the_probe_prints_the_facts_that_the_checks_read():
    facts = software.library_facts()
    assert facts.keys() == FACTS.keys()
    assert type(facts["gpus"]) is list


def test_a_machine_where_all_fits_together():
    findings = [check(FACTS) for check in (software.gpus, software.horovod_nccl)]
    assert [finding.status for finding in findings] == [OK] * 2
    assert "NVIDIA H200 (151 GB, sm_90), NVIDIA H200" in findings[0].found
    assert findings[1].found == "built with 2.30.7"


@pytest.mark.parametrize(
    ("check", "changes", "status", "found", "advice"),
    [
        (software.gpus, {"gpus": []}, OK, "none: training runs on the CPU", ""),
        (
            software.horovod_nccl,
            {"NCCL": 0},
            WARNING,
            "not built in",
            "HOROVOD_GPU_OPERATIONS=NCCL uv sync",
        ),
        (software.horovod_nccl, {"NCCL": 0, "gpus": []}, OK, "there is no GPU", ""),
        (
            software.horovod_nccl,
            {"NCCL": 22105},
            WARNING,
            "built with 2.21.5, not torch's",
            "--reinstall",
        ),
    ],
)
def test_what_does_not_fit_together_is_named_with_what_to_do(check, changes, status, found, advice):
    finding = check(FACTS | changes)
    assert finding.status == status
    assert found in finding.found and advice in finding.advice
    assert bool(finding.advice) == (status != OK)


def test_without_libraries_there_is_nothing_to_fit():
    for check in (software.gpus, software.horovod_nccl):
        finding = check({"error": "ImportError: no"})
        assert (finding.status, finding.found) == (MISSING, "ImportError: no")
