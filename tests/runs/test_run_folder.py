"""Who gets a run folder."""

import tomllib

import pytest

from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.runs.folder import CONFIG, claim


def test_a_folder_is_claimed_by_one_job(tmp_path):
    claim(tmp_path / "run", RunConfig(), 1, "17", others_log=False, resuming=False)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["job"] == "17"
    with pytest.raises(UsageError, match="holds a run, which --resume goes on with"):
        claim(tmp_path / "run", RunConfig(), 1, "18", others_log=False, resuming=False)


def test_a_rank_that_begins_while_a_run_is_claimed_again_reads_a_whole_configuration(tmp_path, monkeypatch):
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
