"""What a worker counts while it trains."""

from hvdtrain.numerics.clock import PARTS
from hvdtrain.ps.messages import PushStatus
from hvdtrain.runs.live import WARM_UP
from hvdtrain.runs.metrics import Recorder, Tally, cut_after


def record(recorder, step, push=None, seconds=0.1):
    row = {"step": step, "samples": 4, "loss": 1.0, "accuracy": 0.5}
    recorder.step(row, dict.fromkeys(PARTS, 0.0) | {"forward": seconds}, 0, push)


def test_staleness_is_that_of_each_bucket_and_a_step_waits_for_all_of_its_answers(tmp_path):
    recorder = Recorder(tmp_path, 0, is_chief=False)
    push = PushStatus(4)
    for staleness in (0, 0, 0):
        push.answered(staleness, dropped=False)
    record(recorder, 1, push)
    assert not any(recorder.tally.staleness)
    push.answered(2, dropped=False)
    recorder.flush()
    assert recorder.tally.staleness[:3] == [3, 0, 1]
    assert (recorder.tally.stale_sum, recorder.tally.stale_max) == (2, 2)
    assert '"staleness": 2' in (tmp_path / "metrics.rank0.jsonl").read_text()  # of a step, the largest
    recorder.close()


def test_the_first_steps_of_each_start_are_kept_apart(tmp_path):
    recorder = Recorder(tmp_path, 0, is_chief=False)
    for step in range(1, WARM_UP + 4):
        record(recorder, step, seconds=9.0 if step <= WARM_UP else 0.1)
    tally = recorder.tally
    assert (sum(tally.durations), tally.first_steps, round(tally.first_s)) == (3, WARM_UP, 9 * WARM_UP)
    recorder.close()
    again = Recorder(tmp_path, 0, is_chief=False, after=WARM_UP + 3, tally=tally)
    record(again, WARM_UP + 4)
    assert (sum(tally.durations), tally.first_steps) == (3, WARM_UP + 1)
    again.close()


def test_the_tallies_of_workers_add_up():
    own = Tally(3, 5, 1.5, 2.0, 12, list(map(float, range(len(PARTS)))), first_steps=3, first_s=0.25, stale_sum=4)
    own.durations[7] = 2
    own.staleness[1] = 4
    own.stale_max = 6
    both = Tally.of([own.row(), own.row()])
    assert (both.steps, both.digest, both.samples, both.first_steps, both.first_s) == (6, 10, 24, 6, 0.5)
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
