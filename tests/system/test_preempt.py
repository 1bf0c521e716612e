"""Requests to leave, which SIGTERM makes."""

import pytest
from helpers.processes import run_python

from hvdtrain.base.system.preempt import EXIT_CODE

SENT_BEFORE = """
import os, signal
from hvdtrain.base.system.preempt import deferred_sigterm, immediate_sigterm
with deferred_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)
    with immediate_sigterm():
        print("goes on")
"""


def test_a_sigterm_that_was_remembered_ends_what_it_is_to_end_at_once():
    """It came after training had begun to defer signals, and before a long compilation began."""
    with run_python(SENT_BEFORE) as process:
        printed, _ = process.communicate(timeout=60)
    assert (process.returncode, printed) == (EXIT_CODE, "")


SENT_TWICE = """
import os, signal
from hvdtrain.base.system import preempt
preempt.UNWINDS_S = {ignored_s}
try:
    with preempt.signals_unwind():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            print("cleaned up")
except SystemExit as end:
    print(end.code)
"""


@pytest.mark.parametrize(("ignored_s", "expected"), [(60, "cleaned up\n143\n"), (0, "143\n")])
def test_a_second_sigterm_soon_after_the_first_does_not_break_off_what_that_began(
    ignored_s, expected
):
    with run_python(SENT_TWICE.format(ignored_s=ignored_s)) as process:
        printed, _ = process.communicate(timeout=60)
    assert printed == expected
