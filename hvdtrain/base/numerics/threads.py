"""Threads that compute on the device of their process."""

import torch


def compute_on(device: torch.device) -> None:
    """Makes a GPU the current one of the thread that calls it; does nothing for the CPU, or where
    no GPU is named.

    CUDA's current device is each thread's: a new thread has the first GPU, which is another
    worker's where several workers share a host. Whatever asks CUDA of the current device there, or
    goes back to it, would make a context on that GPU, which takes some 500 MB of its memory.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
