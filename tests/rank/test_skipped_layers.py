"""Models that leave a layer out in some steps are refused where gradients are sent as backward
computes them.
"""

import pytest
from helpers.jobs import hvdtrain, steps
from helpers.own import SKIPS, written

from hvdtrain.base.world.place import ELASTIC

pytestmark = pytest.mark.timeout(120)
REFUSED = "backward gave no gradient of last.weight, last.bias: every trainable parameter needs a gradient"
LENGTH = (
    "--steps",
    "10",
    "--batch-size",
    "24",
    "--threads",
    "1",
    "--timeout",
    "60",
    "--snapshot-every",
    "never",
)


def train(folder, mode, skips, *options, env=()):
    """A job of two workers, whose ranks end by themselves; each rank that skips does so in its
    third step.
    """
    mine, servers = written(folder, SKIPS), 1 if mode.startswith("ps-") else 0
    return hvdtrain(
        "train",
        "--mode",
        mode,
        "--servers",
        servers,
        *LENGTH,
        "--model",
        f"{mine}:skips",
        "--dataset",
        f"{mine}:data",
        "--out",
        folder / "run",
        *options,
        ranks=2 + servers,
        timeout=50,
        survive=True,
        env={"SKIPS": skips, **dict(env)},
    )


@pytest.mark.parametrize(
    ("mode", "options", "env"),
    [
        ("allreduce", ["--wait-for", "layer"], {}),
        ("ddp", [], {}),
        ("ddp", ["--accumulate", "2"], {ELASTIC: "1"}),
        ("ps-sync", ["--wire", "rpc"], {}),
        ("ps-ssp", ["--staleness", "1"], {}),
    ],
)
def test_a_layer_that_is_left_out_is_named_and_all_ranks_end(tmp_path, mode, options, env):
    """Where one worker alone skips, and in ps-ssp both: there the others would go on without one."""
    done = train(tmp_path, mode, "12" if mode == "ps-ssp" else "1", *options, env=env)
    assert done.returncode == 1 and f"failed: {REFUSED}" in done.stdout, done.stdout


def test_local_steps_leave_a_layer_as_it_is_and_get_their_shares(tmp_path):
    """The share is asked for when backward comes to the last parameter, which it never does."""
    done = train(tmp_path, "ps-async", "12", "--local-steps", "2")
    assert done.returncode == 0, done.stdout
    assert (
        sum(row["samples"] for rank in (1, 2) for row in steps(tmp_path / "run", rank)) == 10 * 24
    )
