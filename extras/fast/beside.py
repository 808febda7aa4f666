"""The joint output of Linears of one input whose weights hold no adapter: on a GPU, 4-bit ones."""
from functools import partial

import torch

from lora import Adapter, is_adapted


class JointOutput:
    """Several Linears of the same input; their outputs stand one behind the other.

    While decoding, their adapters are computed as one, which has the sum of their ranks and a
    block-diagonal B. It takes as few kernels as one of them, and a GPU waits for launches.
    """

    def __init__(self, linears):
        self.linears = linears
        self.are_beside = all(map(is_beside, linears))
        self.adapter = None

    def __call__(self, x):
        """x (R, C, in) gives (R, C, sum of out)."""
        if x.shape[1] > 1 or not self.are_beside:
            # A prompt needs the memory more than a GPU waits for its few launches.
            return torch.cat([linear(x) for linear in self.linears], -1)
        outputs = [type(linear).forward(linear, x) for linear in self.linears]
        if not self.adapter:
            A, B = zip(*(linear.lora.factors(x) for linear in self.linears))
            noises = [linear.lora.column_noise(output)
                      for linear, output in zip(self.linears, outputs)]
            self.adapter = partial(self.linears[0].lora.add, A=torch.cat(A),
                                   B=torch.block_diag(*B), noise=torch.cat(noises))
        return self.adapter(x, torch.cat(outputs, -1))


def is_beside(linear) -> bool:
    """True if a plain adapter is added beside the weight of this Linear while decoding."""
    return is_adapted(linear) and linear.lora.mode == "cached" and (
        type(linear.lora).forward is Adapter.forward)
