"""The report's table of who was there."""

from helpers.report_runs import run

from hvdtrain.report.membership import membership_table
from hvdtrain.report.table import markdown

LIVES = [
    {"member": member, "rank": 1 + member, "incarnation": 1, "joined": 100.0, "left": None, "why": "", "samples": 960}
    for member in (0, 1)
]
RETURN = {"rank": 0, "lost": 107.4, "returned": 107.6, "lost_updates": 0}


def test_a_server_that_came_back_is_named_with_what_that_cost():
    plain = run("ps-async", 2, 1, membership=LIVES)
    assert membership_table([("a", plain)]) is None
    back = run("ps-async", 2, 1, membership=LIVES, returned_servers=[RETURN, RETURN | {"lost_updates": 2}])
    table = markdown(membership_table([("a", plain), ("b", back)]))
    assert "| b | 0 | 2 | 7.6 s |  | a server, killed 0.2 s before: 0 updates lost |  |" in table
    assert "| b | 0 | 3 | 7.6 s |  | a server, killed 0.2 s before: 2 updates lost |  |" in table
    assert table.count("until the end") == 2 and "| a |" not in table
