"""Requests to leave, which SIGTERM makes."""

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
