"""A regression: two models under one optimizer, groups, a schedule, batches of job.sampler.

regression.py [--steps N] [--fault KIND] [--optimizer NAME]
"""

import argparse
import time

import torch
from torch import nn

import hvdtrain as hv

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--optimizer", default="sgd")
parser.add_argument("--fault", default="")
parser.add_argument("--synchronize", action="store_true")
parser.add_argument("--one-model", action="store_true")
parser.add_argument("--counted", action="store_true", help="samples by the sampler")
parser.add_argument("--loose", action="store_true", help="a parameter in no model")
parser.add_argument("--clip-own", action="store_true", help="at more than any gradient has")
parser.add_argument("--amid", action="store_true", help="refresh between backward and step")
parser.add_argument("--unused", action="store_true", help="a parameter without a gradient")
parser.add_argument("--report", action="store_true", help="the loss, after each epoch")
parser.add_argument("--often", action="store_true", help="the mean loss, after each step")
parser.add_argument("--channels-last", action="store_true", help="a convolution in that format")
args = parser.parse_args()

BATCH = 24
job = hv.init() if args.counted else hv.init(batch_size=BATCH)
torch.manual_seed(3 + job.rank)  # prepare gives all workers the first one's weights
width = 9 if args.fault == "parameters" and job.rank else 8
first = nn.Linear(4, width)
if args.channels_last:
    first = nn.Conv2d(2, width, (2, 1)).to(memory_format=torch.channels_last)
body = nn.Sequential(first, nn.Tanh(), nn.Flatten())
body.register_buffer("seen", torch.tensor([float(job.rank)]))
head = nn.Linear(width, 2)
torch.manual_seed(5)
inputs = torch.randn(96, 4)
targets = inputs[:, :2] * inputs[:, 2:]
if args.channels_last:
    inputs = inputs.view(96, 2, 2, 1)
groups = [
    {"params": [head.weight, body[0].weight], "weight_decay": 0.1},
    {"params": [head.bias, body[0].bias], "weight_decay": 0.0, "lr": 0.05},
]
factor = nn.Parameter(torch.full((2,), 1.0 + job.rank))
if args.loose:
    groups[0]["params"].append(factor)
if args.unused:
    body.extra = nn.Parameter(torch.ones(3))
    groups[1]["params"].append(body.extra)
if args.fault == "order" and job.rank:
    groups.reverse()
if args.optimizer in ("sgd", "fused"):
    is_fused = args.optimizer == "fused"
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True, fused=is_fused)
elif args.optimizer == "lbfgs":
    optimizer = torch.optim.LBFGS(head.parameters())
else:
    optimizer = torch.optim.Adam(groups, lr=0.02)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
whole = nn.Sequential(body, head)
models = [whole] if args.one_model else [body, head]
if args.fault == "unprepared":
    raise SystemExit
job.prepare(*models, optimizer)
assert body.seen == 0, "a worker has buffers of its own"
body.seen += job.rank
job.average_buffers()
assert body.seen == (job.size - 1) / 2, "buffers are no mean"
body.seen.zero_()
assert not args.loose or factor[0] == 1, "a worker has a loose parameter of its own"
if args.fault == "twice":
    job.prepare(*models, optimizer)

data = torch.utils.data.TensorDataset(inputs, targets)


def mean_loss():
    with torch.no_grad():
        rows = job.part(data)
        error = ((head(body(inputs[rows])) - targets[rows]) ** 2).sum()
    return float(job.sum(error)) / targets.numel()


loader = torch.utils.data.DataLoader(data, batch_size=BATCH // job.size, sampler=job.sampler(data))
steps = args.steps - (args.fault == "early" and job.rank == 0)
if args.fault == "unstepped":
    raise SystemExit
taken = 0
began = time.monotonic()
while taken < steps:
    for x, y in loader:
        if taken == steps:
            break
        if args.fault == "raises" and taken == 2 and job.rank == job.size - 1:
            raise ValueError("on purpose")
        optimizer.zero_grad()
        predicted = whole(x) if args.one_model else head(body(x))
        if args.loose:
            predicted = predicted * factor
        loss = nn.functional.mse_loss(predicted, y)
        if args.fault == "second" and taken == 2:
            loss.backward(retain_graph=True)
        loss.backward()
        if args.often:
            job.mean(loss)
        if args.synchronize:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 0.1)
        if args.amid:
            job.refresh()
        if args.clip_own:
            nn.utils.clip_grad_norm_(whole.parameters(), 1e6)
        optimizer.step()
        scheduler.step()
        taken += 1
        if args.fault == "lonely" and taken == 2 and job.is_first:
            job.barrier()
        if args.fault == "shapes" and taken == 2:
            job.sum(torch.ones(1 + job.rank))
        if args.often:
            job.mean(loss)
        if args.fault == "last" and taken == steps and job.is_first:
            job.gather(1)
        if args.fault == "ends" and not job.is_first and time.monotonic() > began + 1.5:
            steps = taken
    if args.report:
        job.refresh()
        job.report(loss=mean_loss())
job.finish()
mean = mean_loss()
job.report(loss=mean)
if job.is_first:
    print(f"loss {mean:.6f} with {job.size}", flush=True)
