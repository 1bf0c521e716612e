"""A small language model: shared weights, groups, a schedule within the loop, accumulation,
clipping, bf16 where it is asked for, saving and going on.

    language.py [--accumulate by-hand|in-block] [--bf16] [--save FILE] [--load FILE] [--steps N]
"""

import argparse
import contextlib
import inspect

import torch
from torch import nn

import hvdtrain as hv

CONTEXT = 16
ROWS = 8  # of a step, over all workers and passes


class Model(nn.Module):
    """One block of attention over characters; the embedding's weight is the head's too."""

    def __init__(self, characters: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.places = nn.Parameter(torch.randn(CONTEXT, width) / 10)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.head = nn.Linear(width, characters, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        attended, _ = self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
        x = self.norm(x + attended)
        return self.head(x + self.feed(x) + self.frozen(x))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--accumulate", default="")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--save", default="")
parser.add_argument("--load", default="")
args = parser.parse_args()

job = hv.init(batch_size=ROWS)
torch.manual_seed(1)
text = inspect.getsource(inspect)
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text[:4000]])
model = Model(len(letters))
plain = [p for p in model.parameters() if p.ndim < 2]
decayed = [p for p in model.parameters() if p.ndim >= 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
    lr=1e-2,
    eps=1e-3,  # the gradient of attention's key bias is nothing but rounding
)
begun = job.load(args.load)["step"] if args.load else 0
model, optimizer = job.prepare(model, optimizer)
passes = 2 if args.accumulate else 1

for step in range(begun, args.steps):
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * min(1.0, (step + 1) / 4)
    for part in range(passes):
        each = ROWS // job.size // passes
        first = step * ROWS + (part * job.size + job.rank) * each
        rows = torch.stack(
            [tokens[place * 9 : place * 9 + CONTEXT + 1] for place in range(first, first + each)]
        )
        is_last = part == passes - 1
        waits = args.accumulate == "in-block" and not is_last
        with job.accumulate() if waits else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                scores = model(rows[:, :-1])
            loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten())
            (loss / passes).backward()
    if not args.save and not args.load:
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
job.finish()
if args.save:
    job.save(args.save, step=args.steps)
job.report(loss=float(job.mean(loss)))
