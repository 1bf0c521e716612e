"""How much memory the ranks of a job need at least, told without building the model, which needs torch."""

from hvdtrain.config import RunConfig

# What a rank with a tiny model holds for itself: 330 to 400 MB were measured, libraries that ranks share left out.
BASE_MB = 350
# VGG-11 with ten classes has 128.8 million, VGG-19 139.6; nearly all grow with the square of the width.
PARAMETERS = 128e6
STATES = {"adam": 2, "adamw": 2}  # numbers that an optimizer keeps for each weight; sgd keeps one if it has momentum


def rank_mb(config: RunConfig, workers: int) -> float:
    """MiB that a rank holds, the mean over workers and servers: all of it but activations and buffers of messages.

    A worker has float32 weights and their gradients, and the optimizer's states where there is no server. The servers
    have all that once more, between them. For an Adam worker with 139 million weights, 2,120 MB, 2,150 were measured
    beside the base, and for a worker and a server together, 3,180 MB, 3,170.
    """
    if config.device == "cuda":  # all of it is on the GPU
        return BASE_MB
    states = STATES.get(config.optimizer, int(config.momentum > 0))
    copies = workers * 2 + 2 + states if config.servers else workers * (2 + states)
    parameters = PARAMETERS if config.model.startswith("vgg") else 0  # the others have less than 2 million
    weights_mb = parameters * config.width**2 * 4 / 2**20
    return BASE_MB + copies * weights_mb / (workers + config.servers)
