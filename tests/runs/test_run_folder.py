"""Who gets a run folder."""

import os
import tomllib

import pytest
from click.testing import CliRunner

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.launch.commands import launch
from hvdtrain.runs.folder import CONFIG, claim, refuse_others, wait_for_claim


def test_a_folder_is_claimed_by_one_job(tmp_path):
    claim(tmp_path / "run", RunConfig(), 1, "17", others_log=False, resuming=False)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["job"] == "17"
    with pytest.raises(UsageError, match="holds a run, which --resume goes on with"):
        claim(tmp_path / "run", RunConfig(), 1, "18", others_log=False, resuming=False)


def test_a_rank_that_begins_while_a_run_is_claimed_again_reads_a_whole_configuration(
    tmp_path, monkeypatch
):
    RunConfig(mode="ddp").write(tmp_path / CONFIG, job="17")
    before, seen, write = (tmp_path / CONFIG).read_text(), [], RunConfig.write

    def look(config, path, **also):
        write(config, path, **also)
        seen.append((tmp_path / CONFIG).read_text())

    monkeypatch.setattr(RunConfig, "write", look)
    claim(tmp_path, RunConfig(mode="ddp"), 1, "18", others_log=False, resuming=True)
    assert seen == [before] and 'job = "18"' in (tmp_path / CONFIG).read_text()
    with pytest.raises(UsageError, match="another job has claimed it"):
        claim(tmp_path, RunConfig(), 1, "19", others_log=False, resuming=True)


@pytest.mark.parametrize("text", [None, "", 'job = "16"\n', "no TOML"])
def test_a_claim_that_never_comes_is_not_waited_for_without_end(text, tmp_path):
    if text is not None:
        (tmp_path / CONFIG).write_text(text)
    with pytest.raises(Failure, match=r"config.toml does not name this job \(17\) after 0.2 s"):
        wait_for_claim(tmp_path, "17", limit_s=0.2)
    (tmp_path / CONFIG).write_text('job = "17"\n')
    wait_for_claim(tmp_path, "17", limit_s=0.0)


def test_logs_of_ranks_on_other_hosts_may_come_before_the_claim(tmp_path):
    """On a file system that hosts share, a rank there may be faster than the first worker."""
    (tmp_path / "run" / "logs").mkdir(parents=True)
    with pytest.raises(UsageError, match="is not empty"):
        claim(tmp_path / "run", RunConfig(), 2, "17", others_log=False, resuming=False)
    claim(tmp_path / "run", RunConfig(), 2, "17", others_log=True, resuming=False)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        claim(tmp_path / "used", RunConfig(), 2, "17", others_log=True, resuming=False)


def test_a_folder_of_another_user_or_in_which_others_write_is_refused(tmp_path):
    """They would choose what a job reads there. A folder of /tmp is one's own."""
    (run := tmp_path / "run").mkdir()
    for mode in (0o757, 0o777, 0o1777):
        run.chmod(mode)
        with pytest.raises(
            UsageError, match=f"other users may write in {run}, and change what runs: `chmod go-w"
        ):
            claim(run, RunConfig(), 1, "17", others_log=False, resuming=False)
        launched = CliRunner().invoke(
            launch, ["-n", "1", "--out", str(run), "--", "--mode", "single"]
        )
        assert isinstance(launched.exception, UsageError) and "may write in" in str(
            launched.exception
        )
    run.chmod(0o775)  # of this user's own group, as a umask of 002 makes it
    if os.geteuid() == 0:
        os.chown(run, 0, 12345)
        with pytest.raises(UsageError, match="other users may write in"):
            refuse_others(run)
        run.chmod(0o755)
        refuse_others(run)
        os.chown(run, 12345, 0)
        with pytest.raises(UsageError, match=f"--out: {run} belongs to another user"):
            claim(run, RunConfig(), 1, "17", others_log=False, resuming=False)
        os.chown(run, 0, 0)
    claim(run, RunConfig(), 1, "17", others_log=False, resuming=False)
    assert list(run.glob("config.toml"))
    refuse_others(tmp_path / "nothing there")


def test_a_run_folder_that_is_made_is_not_for_others_to_write_in(tmp_path):
    before = os.umask(0)
    try:
        claim(tmp_path / "a" / "run", RunConfig(), 1, "17", others_log=False, resuming=False)
    finally:
        os.umask(before)
    refuse_others(tmp_path / "a" / "run")
