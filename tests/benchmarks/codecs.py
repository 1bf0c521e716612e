"""What each codec costs in samples and accuracy: the digits, learned once with each codec for each
seed.

    python tests/benchmarks/codecs.py --codecs none,fp16,bf16,int8,topk:0.01,2bit:0.005 --seeds 5

The workers of ps-sync, with its buckets, codecs and optimizer, in one process: what is learned
depends on that alone, and not on the machine or what else it does. A row a codec: samples until
--target of the validation images are right at the end of an epoch, and how many are at the last,
medians and ranges over the seeds; how many bytes a worker sends for each weight.
"""

import argparse
import dataclasses
import statistics

import torch

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.compression import Compressor
from hvdtrain.base.numerics.flat import flatten_weights, trained
from hvdtrain.base.numerics.optimizers import lr_at, make_optimizer, set_lr
from hvdtrain.data.find import find_dataset
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampling import BatchSampler
from hvdtrain.job.buckets.partition import cut
from hvdtrain.job.training.evaluation import in_batches
from hvdtrain.job.training.feed import Normalise
from hvdtrain.job.training.model import image_side, initial_model
from hvdtrain.job.training.step import backward


def accuracy(model: torch.nn.Module, config: RunConfig, loader: Loader) -> float:
    model.eval()
    normalise, right = Normalise(config, torch.device("cpu")), 0
    with torch.inference_mode():
        for _, (images, labels) in loader.batches(in_batches(range(len(loader.samples)))):
            right += int((model(normalise(images)).argmax(1) == labels).sum())
    model.train()
    return right / len(loader.samples)


def learn(
    config: RunConfig, workers: int, train: Loader, validation: Loader
) -> tuple[int | None, float, float]:
    """Samples until the target, the last accuracy, and bytes that a worker sent for each weight and
    step.
    """
    model = initial_model(config, 10)
    model.train()
    weights, parameters = flatten_weights(model), trained(model)
    pieces = cut([p.numel() for p in parameters], 1, config.bucket_elements)
    compressors = [
        [Compressor(config.compression, piece.lengths) for piece in pieces] for _ in range(workers)
    ]
    optimizer = make_optimizer(config, [weights])
    sampler = BatchSampler(len(train.samples), config.batch_size, config.seed, 0, workers)
    steps = config.total_steps(len(train.samples))
    normalise, reached, sent = Normalise(config, torch.device("cpu")), None, 0
    for epoch in range(1, int(config.epochs) + 1):
        first = (epoch - 1) * sampler.steps_per_epoch
        for step in range(first, first + sampler.steps_per_epoch):
            total = torch.zeros_like(weights)
            for worker in range(workers):
                [(share, (images, labels))] = train.batches(
                    [sampler.share(step * workers + worker)]
                )
                backward(config, model, share, normalise(images), labels, lambda more: None)
                gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
                model.zero_grad(set_to_none=True)
                for compressor, piece in zip(compressors[worker], pieces, strict=True):
                    parts = compressor.encode(gradient[piece.start : piece.stop].clone())
                    sent += sum(part.nbytes for part in parts)
                    total[piece.start : piece.stop] += compressor.decode(parts)
            weights.grad = total.div_(workers)
            set_lr(optimizer, lr_at(config, step + 1, epoch, steps))
            optimizer.step()
        rate = accuracy(model, config, validation)
        if reached is None and rate >= config.target_accuracy:
            reached = sampler.trained(step + 1)
    return reached, rate, sent / (step + 1) / workers / len(weights)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", default="none,fp16,bf16,int8,topk:0.01,2bit:0.005")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=0.0005)
    args = parser.parse_args()
    torch.set_num_threads(1)
    base = RunConfig(
        mode="ps-sync",
        servers=1,
        epochs=args.epochs,
        model=args.model,
        width=args.width,
        lr=args.lr,
        target_accuracy=args.target,
    )
    data = find_dataset(base.dataset)
    side = image_side(base, data)
    train, validation = Loader(data.train, side, 1), Loader(data.validation, side, 1)
    print(
        f"{'codec':<12}  {'samples to ' + str(args.target):<32}  {'accuracy':<22}  bytes a weight"
    )
    for codec in args.codecs.split(","):
        learned = []
        for seed in range(1, args.seeds + 1):
            config = dataclasses.replace(base, compression=codec, seed=seed)
            learned.append(learn(config, args.workers, train, validation))
        reached = sorted(samples for samples, _, _ in learned if samples)
        samples = (
            f"{statistics.median_low(reached):,} ({reached[0]:,} to {reached[-1]:,})"
            if reached
            else "never"
        )
        rates = [accuracy for _, accuracy, _ in learned]
        last = f"{statistics.median(rates):.3f} ({min(rates):.3f} to {max(rates):.3f})"
        often = f"{samples}, {len(reached)} of {args.seeds}"
        print(f"{codec:<12}  {often:<32}  {last:<22}  {learned[0][2]:.2f}", flush=True)


if __name__ == "__main__":
    main()
