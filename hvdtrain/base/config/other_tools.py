"""Options as other tools call them: what they are here, for whoever types them."""

import click

LAUNCH_OPTIONS = (
    "-n",
    "--num-workers",
    "--workers",
    "-H",
    "--hosts",
    "--hostfile",
    "--launcher",
    "--elastic",
    "--respawn",
)
# Names that other tools have for an option, with - for _.
OTHERS_NAMES = {
    "--lr": ("--learning-rate", "--base-lr", "--init-lr"),
    "--epochs": ("--num-epochs", "--max-epochs", "--n-epochs", "--num-train-epochs"),
    "--steps": ("--max-steps", "--iterations", "--iters", "--max-iters"),
    "--batch-size": ("--bs", "--train-batch-size", "--total-batch-size"),
    "--weight-decay": ("--wd", "--decay"),
    "--optimizer": ("--opt", "--optim"),
    "--model": ("--arch", "--network", "--net", "--backbone"),
    "--dataset": ("--data", "--data-dir", "--data-path", "--data-root", "--train-dir"),
    "--image-size": ("--img-size", "--imgsz", "--crop-size", "--resolution"),
    "--pretrained": ("--weights", "--checkpoint", "--ckpt", "--load-from", "--finetune"),
    "--accumulate": ("--gradient-accumulation-steps", "--accum-iter", "--grad-accum"),
    "--precision": ("--amp", "--fp16", "--bf16", "--mixed-precision"),
    "--out": ("--output", "--output-dir", "--save-dir", "--log-dir", "--work-dir", "--logdir"),
    "--seed": ("--random-seed", "--manual-seed"),
    "--threads": ("--num-threads", "--omp-num-threads"),
    "--timeout": ("--dist-timeout",),
}
# What starts ranks in other tools.
OTHERS_LAUNCH_OPTIONS = (
    "--nproc-per-node",
    "--nnodes",
    "--world-size",
    "--gpus",
    "--num-gpus",
    "--ngpus",
    "--np",
    "--num-processes",
)


def explain_unknown(option: str, command: click.Command) -> str:
    """Returns what to give in place of an option that the command lacks; empty if nobody knows.

    Args:
        option: the option as it was typed, such as `--learning_rate`.
        command: the command that was called.
    """
    name = option.replace("_", "-")
    starts_ranks = name in LAUNCH_OPTIONS or name in OTHERS_LAUNCH_OPTIONS
    if command.name == "train" and starts_ranks:
        return "train is one rank of a job, and `hvdtrain launch -n 2 -- …` starts several"
    if name in ("--local-rank", "--rank") and command.name in ("train", "run"):
        return (
            "ranks find themselves in the environment; start them by torchrun in place of "
            "torch.distributed.launch"
        )
    known: set[str] = set()
    for param in command.params:
        known.update(param.opts)
    here = [ours for ours, others in OTHERS_NAMES.items() if name in others and ours in known]
    return f"here it is {here[0]}" if here else ""
