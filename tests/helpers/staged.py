"""What has gradients go through CPU memory as those of a GPU do, with copies that end late."""

LATE_EVENTS = """
import random, time, torch
class Event(torch.cpu.Event):
    def synchronize(self):
        time.sleep(random.random() / 50)
torch.cpu.Event = Event
"""
# Is run first in a rank.
STAGED_RING = f"""{LATE_EVENTS}
import dataclasses
from hvdtrain.job.modes import allreduce
connect = allreduce.connect
def staged(job):
    sync = connect(job)
    sync.staged, sync.config = True, dataclasses.replace(sync.config, bucket_mb=0.25)
    return sync
allreduce.connect = staged
"""
