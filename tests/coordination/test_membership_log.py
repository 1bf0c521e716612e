"""Who was there, and when."""

import json

from hvdtrain.runs.membership_log import LEFT, Life, MembershipLog, membership_file, who_is_gone


def test_who_joins_takes_the_place_of_one_that_is_gone_or_a_new_one(tmp_path):
    lives = MembershipLog(membership_file(tmp_path), servers=1, workers=2)
    assert lives.end(1, "its connection ended").rank == 2
    assert (lives.begin(2, pid=70).rank, lives.begin(3, pid=71).rank) == (2, 3)
    lives.end(2, LEFT)
    lives.end(2, "its connection ended")  # which comes after it had left
    lives.end(0, "its connection ended")
    again = lives.begin(4, pid=72)
    assert (again.rank, again.incarnation) == (1, 2)
    assert [(life.rank, life.incarnation, life.why) for life in lives.all()] == [
        (1, 1, "its connection ended"),
        (2, 1, "its connection ended"),
        (2, 2, LEFT),
        (3, 1, ""),
        (1, 2, ""),
    ]
    lives.close()
    written = [json.loads(line) for line in membership_file(tmp_path).read_text().splitlines()]
    assert len(written) == 5 + 3  # a line for each that came, and for each that went


def life(rank, why="", incarnation=1):
    return Life(10 * rank + incarnation, rank, incarnation, None, 0.0, why=why)


def test_who_left_in_order_is_not_called_lost():
    killed = "its connection ended"
    assert who_is_gone([life(1), life(2)]) == ""
    assert who_is_gone([life(1), life(2, LEFT), life(3, killed)], {1: 60, 2: 40, 3: 50}) == (
        "1 of 3 workers: rank 2 left after step 40, rank 3 was lost after step 50"
    )
    assert who_is_gone([life(1), life(2, killed), life(2, LEFT, 2)]) == (
        "1 of 2 workers: rank 2 was lost, came back and left"
    )
    assert who_is_gone([life(1), life(2, killed), life(2, "", 2)], {2: 40}) == (
        "2 of 2 workers: rank 2 was lost and came back"
    )
    assert who_is_gone([life(1), life(2, LEFT), life(2, "", 2)]) == ""  # another took its place
