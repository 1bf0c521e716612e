"""Estimates from below how much memory the ranks of a job need. Of our models none is built: that needs torch."""

from hvdtrain.config.run_config import RunConfig
from hvdtrain.models import is_own
from hvdtrain.numerics.optimizers import vectors_kept
from hvdtrain.system.own_code import file_of

# Memory of a rank with a tiny model: 330 to 400 MB were measured, without the libraries, which ranks share.
BASE_MB = 350
# VGG-11 with ten classes has 128.8 million, VGG-19 139.6; nearly all grow with the square of the width.
PARAMETERS = 128e6


def rank_mb(config: RunConfig, workers: int) -> float:
    """MiB of a rank, the mean over workers and servers, without activations and message buffers.

    A worker has float32 weights, their gradients, and the optimizer's states where there are no servers. With servers,
    these share another copy of all that, states included. Measured beside BASE_MB with 139 million weights and Adam:
    2,150 MB for one worker (the estimate is 2,120), 3,170 MB for a worker and a server together (3,180).
    """
    if config.device == "cuda":  # all of it is on the GPU
        return BASE_MB
    states = vectors_kept(config)
    weight_copies = workers * 2 + 2 + states if config.servers else workers * (2 + states)
    weights_mb = _parameters(config) * 4 / 2**20
    return BASE_MB + weight_copies * weights_mb / (workers + config.servers)


def _parameters(config: RunConfig) -> float:
    """Weights of the model: of ours but VGGs two million at most, which count as none. So does what is not here."""
    if config.model.startswith("vgg"):
        return PARAMETERS * config.taken_width**2
    file = file_of(config.model)
    if not is_own(config.model) or (file and not file.is_file()):
        return 0
    from hvdtrain.models.own import count_parameters

    return count_parameters(config.model)


def asked_mb(config: RunConfig, workers: int) -> int:
    """MiB to ask a scheduler for, for each rank: with room for images, activations, messages and libraries."""
    return round(2 * rank_mb(config, workers)) + 2048
