"""Randomness by address.

A draw is a function of (run seed, purpose, step, micro-step, data index, ...), never of how many draws came before it.
That is why it is the same after a resume, at another world size and with another number of workers, and why a
checkpoint holds no generator state.
"""

import hashlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def derive_seed(seed: int, *address: str | int) -> int:
    """Returns a seed in [0, 2**63) for the draw at `address`, by blake2b over an unambiguous encoding."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in (seed, *address))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def numpy_generator(seed: int, *address: str | int) -> "np.random.Generator":
    """Returns a fresh PCG64 generator for `address`."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(derive_seed(seed, *address)))


def torch_generator(seed: int, *address: str | int, device: str = "cpu") -> "torch.Generator":
    """Returns a fresh torch generator on `device` for `address`."""
    import torch

    generator = torch.Generator(device=device)
    generator.manual_seed(derive_seed(seed, *address))
    return generator


def seed_micro_step(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seeds the default generators (python, numpy, torch) for one forward/backward.

    Dropout and any random call in a user's model read the default generators; seeding them at every micro-step makes
    those draws addressed too, so nothing about them has to be saved.
    """
    import numpy as np

    from trainer.core.device import seed_generators

    value = derive_seed(seed, "micro_step", step, micro_step, rank)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    seed_generators(value)
