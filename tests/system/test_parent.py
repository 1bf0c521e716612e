"""Ranks end with what started them; what was started by hand does not."""

import os
import subprocess
import sys

import pytest

# In place of an sshd that serves a connection: it starts a rank, and ends. The rank says so if it
# is still there after.
SSHD = """
import os, subprocess, sys
with open("/proc/self/comm", "w") as file:
    file.write("sshd")
rank = '''
import os, sys, time
from hvdtrain.base.system import parent
parent._EVERY_S = 0.05
starter = os.getppid()
parent.end_with_starter(sys.argv[1].removesuffix("-by-recipe"), by_recipe="-" in sys.argv[1])
print("begun", flush=True)
while os.getppid() == starter:
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
print("lives")
'''
rank = subprocess.Popen([sys.executable, "-c", rank, *sys.argv[1:]], stdout=subprocess.PIPE)
os.write(1, rank.stdout.readline())
subprocess.Popen(["cat"], stdin=rank.stdout)
"""


@pytest.mark.parametrize(
    ("starter", "lives"),
    [("env", True), ("alone", True), ("horovodrun", False), ("env-by-recipe", False)],
)
def test_a_rank_that_was_started_by_hand_lives_on_after_logout(starter, lives):
    until_it_tells_s = "1" if lives else "20"
    words = [sys.executable, "-c", SSHD, starter, until_it_tells_s]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=40, env=os.environ, start_new_session=True
    )
    assert done.stdout.split() == ["begun", *(["lives"] if lives else [])], done.stderr
