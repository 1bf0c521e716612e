"""Lower estimates of the memory that the ranks of a job need.

None of our models is built for that, since building needs torch.
"""

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.optimizers import vectors_kept
from hvdtrain.base.system.own_code import file_of
from hvdtrain.models import is_own

# The memory of a rank with a tiny model (330 to 400 MB were measured), without the libraries, which
# ranks share.
BASE_MB = 350
# Weights of a VGG of width 1: VGG-11 with ten classes has 128.8 million, VGG-19 139.6. Nearly all
# of them grow with the square of the width.
PARAMETERS = 128e6


def rank_mb(config: RunConfig, workers: int) -> float:
    """Returns the MiB of a rank, the mean over workers and servers.

    A worker has float32 weights and gradients, and without servers the optimizer's state. Servers
    share another copy of all that, state included. Activations and message buffers are left out.
    Beside BASE_MB, with 139 million weights and Adam, 2,150 MB were measured for one worker (the
    estimate is 2,120), and 3,170 MB for a worker and a server together (3,180).
    """
    if config.device == "cuda":  # weights are on the GPU
        return BASE_MB
    states = vectors_kept(config)
    if config.servers:
        weight_copies = workers * 2 + 2 + states
    else:
        weight_copies = workers * (2 + states)
    weights_mb = _parameters(config) * 4 / 2**20
    return BASE_MB + weight_copies * weights_mb / (workers + config.servers)


def _parameters(config: RunConfig) -> float:
    """Returns the number of the model's weights.

    Our models other than VGGs have two million at most and count as none. So do models
    without a file on this machine.
    """
    if config.model.startswith("vgg"):
        return PARAMETERS * config.effective_width**2
    file = file_of(config.model)
    if not is_own(config.model) or (file and not file.is_file()):
        return 0
    from hvdtrain.models.own import count_parameters

    return count_parameters(config.model)


def requested_mb(config: RunConfig, workers: int) -> int:
    """Returns the MiB to request from a scheduler for each rank.

    There is room for images, activations, messages and libraries.
    """
    return round(2 * rank_mb(config, workers)) + 2048
