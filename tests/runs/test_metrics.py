"""What a worker counts while it trains."""

import json
import os
import warnings

from hvdtrain.base.numerics.clock import PARTS
from hvdtrain.job.recording.metrics import STEP_PARTS, Recorder, StepLines, Tally, cut_after
from hvdtrain.job.wire.messages import PushStatus
from hvdtrain.runs.live import WARM_UP
from hvdtrain.runs.schema import each_share, read_steps


def record(recorder, step, push=None, seconds=0.1):
    row = {"step": step, "time": 0.0, "samples": 4, "loss": 1.0, "accuracy": 0.5}
    recorder.step(row, dict.fromkeys(PARTS, 0.0) | {"forward": seconds}, 0, push)


def test_staleness_is_that_of_each_bucket_and_a_step_waits_for_all_of_its_answers(tmp_path):
    recorder = Recorder(tmp_path, 0, is_chief=False)
    push = PushStatus(4)
    push.seen += [0, 0, 0]
    record(recorder, 1, push)
    assert not any(recorder.tally.staleness)
    push.seen.append(2)
    recorder.flush()
    assert recorder.tally.staleness[:3] == [3, 0, 1]
    assert (recorder.tally.stale_sum, recorder.tally.stale_max) == (2, 2)
    # of a step, the largest
    assert '"staleness": 2' in (tmp_path / "metrics.rank0.jsonl").read_text()
    recorder.close()


def test_the_first_steps_of_each_start_are_kept_apart(tmp_path):
    recorder = Recorder(tmp_path, 0, is_chief=False)
    for step in range(1, WARM_UP + 4):
        record(recorder, step, seconds=9.0 if step <= WARM_UP else 0.1)
    tally = recorder.tally
    assert (sum(tally.durations), tally.first_steps, round(tally.first_s)) == (
        3,
        WARM_UP,
        9 * WARM_UP,
    )
    recorder.close()
    again = Recorder(tmp_path, 0, is_chief=False, after=WARM_UP + 3, tally=tally)
    record(again, WARM_UP + 4)
    assert (sum(tally.durations), tally.first_steps) == (3, WARM_UP + 1)
    again.close()


PARTS_S = {f"{part}_s": 0.0 for part in STEP_PARTS}


def share(step, time, loss=1.0, samples=4):
    return {
        "step": step,
        "epoch": 1,
        "samples": samples,
        "loss": loss,
        "accuracy": 0.5,
        **PARTS_S,
        "forward_s": 0.25,
        "staleness": step,
        "time": time,
    }


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_that_may_wait_are_written_together(tmp_path):
    lines = StepLines(tmp_path / "lines", leased=False, after=0, at_once=False)
    lines.add(share(1, 1.0))
    lines.add(share(2, 2.0))
    assert read(tmp_path / "lines") == []
    lines.write()
    assert [row["step"] for row in read(tmp_path / "lines")] == [1, 2]
    lines.at_once = True
    lines.add(share(3, 3.0))
    assert [row["step"] for row in read(tmp_path / "lines")] == [1, 2, 3]
    lines.at_once = False
    lines.add(share(4, 4.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of threads
        forked = os.fork()
    if not forked:  # a script may fork after `prepare`
        lines.write()
        os._exit(0)
    os.waitpid(forked, 0)
    assert [row["step"] for row in read(tmp_path / "lines")] == [1, 2, 3]
    lines.close()
    assert [row["step"] for row in read(tmp_path / "lines")] == [1, 2, 3, 4]


def test_a_line_is_a_step_whatever_shares_of_it_a_worker_had(tmp_path):
    lines = StepLines(tmp_path / "lines", leased=True, after=0)
    for row in (share(2, 1.0), share(2, 2.0, loss=4.0, samples=2), share(3, 3.0), share(1, 4.0)):
        lines.add(row)  # the last one another worker had lost
    lines.reach(5, 1)
    lines.add(share(6, 5.0))
    lines.close()
    rows = read(tmp_path / "lines")
    assert [(row["step"], row["shares"], row["samples"]) for row in rows] == [
        (1, 0, 0),
        (2, 2, 6),
        (3, 2, 8),
        (4, 0, 0),
        (5, 0, 0),
        (6, 1, 4),
    ]
    assert [row["loss"] for row in rows] == [None, 2.0, 1.0, None, None, 1.0]
    assert [row["time"] for row in rows] == [0.0, 2.0, 4.0, 4.0, 4.0, 5.0]
    assert (rows[1]["forward_s"], rows[1]["staleness"], rows[2]["staleness"]) == (0.5, 2, 2)
    each = each_share(read_steps(tmp_path / "lines")[0])
    assert [one.time for one in each] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert {(one.forward_s, one.shares) for one in each} == {(0.25, 1)}
    assert [one.samples for one in each] == [3, 3, 4, 4, 4]


def test_who_joins_has_lines_from_its_first_step_on(tmp_path):
    lines = StepLines(tmp_path / "lines", leased=True, after=None)
    lines.reach(3, 1)
    lines.add(share(7, 1.0))
    lines.reach(8, 1)
    lines.close()
    assert [(row["step"], row["shares"]) for row in read(tmp_path / "lines")] == [(7, 1), (8, 0)]


def test_the_tallies_of_workers_add_up():
    own = Tally(
        3,
        5,
        1.5,
        2.0,
        12,
        list(map(float, range(len(PARTS)))),
        first_steps=3,
        first_s=0.25,
        stale_sum=4,
    )
    own.durations[7] = 2
    own.staleness[1] = 4
    own.stale_max = 6
    both = Tally.of([own, own])
    assert (both.steps, both.digest, both.samples, both.first_steps, both.first_s) == (
        6,
        10,
        24,
        6,
        0.5,
    )
    assert both.seconds == [2.0 * part for part in range(len(PARTS))]
    assert (both.durations[7], both.staleness[1], both.stale_sum, both.stale_max) == (4, 8, 8, 6)


def test_what_is_cut_is_never_written_anew(tmp_path):
    """A kill at that moment, or a full disk, would lose the lines before too."""
    file = tmp_path / "metrics.rank0.jsonl"
    lines = [f'{{"step": {step}}}\n' for step in (1, 2, 3)]
    file.write_text("".join(lines) + '{"ste')
    number = file.stat().st_ino
    for step, kept in ((3, 3), (2, 2), (0, 0)):
        with file.open() as reader:
            cut_after(file, step)
            assert reader.read() == "".join(lines[:kept])
        assert file.stat().st_ino == number
