"""Who was there, and when."""

import json

from hvdtrain.coordination.membership_log import LEFT, MembershipLog, membership_file


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
        (1, 1, "its connection ended"), (2, 1, "its connection ended"), (2, 2, LEFT), (3, 1, ""), (1, 2, ""),
    ]  # fmt: skip
    lives.close()
    written = [json.loads(line) for line in membership_file(tmp_path).read_text().splitlines()]
    assert len(written) == 5 + 3  # a line for each that came, and for each that went
