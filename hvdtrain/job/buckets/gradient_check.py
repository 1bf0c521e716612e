"""A check that backward gives each trained parameter its gradient in every step.

Modes that send gradients as backward computes them have nothing else to send.
"""

from torch import nn

from hvdtrain.base.errors import Failure
from hvdtrain.base.formatting import some_of
from hvdtrain.models.own import WITHOUT_GRADIENT


class GradientCheck:
    """Notes which parameters of a model have had their gradient in a step.

    A bucket is sent when all its parameters have their gradients. If one were left out, the next
    step's gradient would complete the bucket, and other workers would wait for this one meanwhile.

    Args:
        model: the model. Its trained parameters are numbered in the order of model.parameters().
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = [
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        self._came: set[int] = set()

    @property
    def has_begun(self) -> bool:
        """Whether a gradient has come in this step."""
        return bool(self._came)

    def note(self, parameter: int) -> None:
        """Notes that the parameter of this number has its gradient, which is sent as it is now.

        Raises:
            Failure: the parameter had one in this step before, which has been sent without this
                part.
        """
        if parameter in self._came:
            raise Failure(
                f"{self._names[parameter]} had two gradients in one backward pass, and is sent with the first: with "
                "torch.utils.checkpoint, give use_reentrant=False"
            )
        self._came.add(parameter)

    def end_backward(self) -> None:
        """Checks the step's gradients, after its last backward pass and before the next step.

        Raises:
            Failure: some parameters had no gradient; the line names them.
        """
        missing = [name for number, name in enumerate(self._names) if number not in self._came]
        self._came.clear()
        if missing:
            raise Failure(
                f"backward gave no gradient of {some_of(missing)}: every trainable parameter needs a gradient in each "
                f"step, with --accumulate in the last pass of the step: {WITHOUT_GRADIENT}"
            )
