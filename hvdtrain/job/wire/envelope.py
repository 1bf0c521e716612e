"""The encryption of a message's tensors, which any thread may do, in any order.

A message has a new key for its tensors. The key travels before the header, in the channel that two
processes have (`noise`). So the channel, which has an order, encrypts headers alone. A message can
be sent again over another channel as it is.
"""

import os

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hvdtrain.job.wire.noise import KEY, NONCE, TAG, NotAuthentic
from hvdtrain.job.wire.packing import Frames


def enclose(frames: Frames) -> Frames:
    """Returns a message with encrypted tensors, and their key before the header."""
    header, *tensors = frames
    if not tensors:
        return frames
    key = os.urandom(KEY)
    aes = AESGCM(key)
    encrypted = []
    for number, tensor in enumerate(tensors):
        memory = _memory(len(tensor) + TAG)
        aes.encrypt_into(number.to_bytes(NONCE), tensor, None, memory)
        encrypted.append(memory)
    return [key + header, *encrypted]


def disclose(frames: Frames) -> Frames:
    """Returns what `enclose` was given. The header has come through a channel.

    Raises:
        NotAuthentic: a tensor was changed, or is not this message's.
    """
    header, *encrypted = frames
    if not encrypted:
        return frames
    aes = AESGCM(header[:KEY])
    tensors = []
    for number, frame in enumerate(encrypted):
        if len(frame) < TAG:
            raise NotAuthentic
        memory = _memory(len(frame) - TAG)
        try:
            aes.decrypt_into(number.to_bytes(NONCE), memoryview(frame), None, memory)
        except InvalidTag:
            raise NotAuthentic from None
        tensors.append(memory)
    return [header[KEY:], *tensors]


def _memory(size: int) -> memoryview:
    """Returns so many bytes of memory, which a bytearray would fill with zeros first."""
    return np.empty(size, np.uint8).data
