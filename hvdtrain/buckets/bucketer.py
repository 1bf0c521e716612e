"""A bucket's gradients come together as backward computes them, for servers and for rings."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from hvdtrain.buckets.partition import Piece
from hvdtrain.buckets.staging import Staging


class Bucketer:
    """Hands over each bucket when its last gradient is there: they may come in any order.

    Args:
        sizes: elements of each parameter.
        pieces: the buckets.
        complete: called with a bucket's number and gradient, [bucket] float32, by the thread that has put the last part
            of it. With `staging` the gradient is on its way there: see Staging.when_out.
        staging: what copies gradients off a GPU.
        device: where gradients come together, without staging; by default the CPU.

    Attributes:
        of_parameter: the numbers of the buckets that each parameter lies in.
        accumulating: another backward pass of the same step follows: no gradient is complete after this one.
    """

    def __init__(
        self, sizes: Sequence[int], pieces: Sequence[Piece], complete: Callable[[int, torch.Tensor], None],
        staging: Staging | None = None, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.pieces, self.complete, self.staging, self.accumulating = pieces, complete, staging, False
        starts = list(accumulate(sizes, initial=0))
        # Of each parameter: the buckets that it lies in, where it lies there, and which range of it, laid flat, does.
        self._parts: list[list[tuple[int, slice, slice]]] = [[] for _ in sizes]
        self._places: list[list[tuple[int, slice, slice]]] = [[] for _ in pieces]  # by bucket: a parameter, and these
        for number, piece in enumerate(pieces):
            for parameter in piece.parameters:
                start, stop = max(piece.start, starts[parameter]), min(piece.stop, starts[parameter + 1])
                place, part = (slice(start - zero, stop - zero) for zero in (piece.start, starts[parameter]))
                self._parts[parameter].append((number, place, part))
                self._places[number].append((parameter, place, part))
        self.of_parameter = [[number for number, _, _ in parts] for parts in self._parts]
        # Where the gradients of several parameters come together; others leave as they are.
        self._gathered = {
            number: torch.empty(piece.stop - piece.start, device=device)
            for number, piece in enumerate(pieces)
            if len(piece.parameters) > 1 and not staging
        }
        self._missing = [len(piece.parameters) for piece in pieces]

    def take_from(self, parameters: Sequence[nn.Parameter], keep: bool) -> None:
        """Take each backward's gradients of these parameters, and leave them there only if they are to be kept."""

        def take(index: int, parameter: nn.Parameter) -> None:
            if not self.accumulating:
                assert parameter.grad is not None
                if keep:  # put_back writes into it
                    parameter.grad = parameter.grad.contiguous()
                self.put(index, parameter.grad)
                if not keep:
                    parameter.grad = None

        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(take, index))

    def put(self, parameter: int, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient, which nobody else may change any more."""
        flat = gradient.reshape(-1)
        for number, place, part in self._parts[parameter]:
            bucket = flat[part]
            if self.staging:
                self.staging.copy_out(number, place.start, bucket)
                bucket = self.staging.gradients[number]
            elif number in self._gathered:
                self._gathered[number][place].copy_(bucket)
                bucket = self._gathered[number]
            self._missing[number] -= 1
            if not self._missing[number]:
                self._missing[number] = len(self.pieces[number].parameters)
                self.complete(number, bucket)

    def put_back(self, number: int, values: torch.Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Have the kept gradients of a bucket be these values, [bucket]. They are already where the bucket was not
        gathered, and was changed in place.
        """
        for index, place, part in self._places[number]:
            gradient = parameters[index].grad
            assert gradient is not None
            kept, average = gradient.view(-1)[part], values[place]
            if kept.data_ptr() != average.data_ptr():
                kept.copy_(average)
