"""The rows of a training pass in as many threads as torch has, each of which computes alone.

The operations of a small model take some microseconds each, and threads that share every one of
them wait for each other most of the time. Here each thread takes a part of the rows through the
whole model, forward and backward. Log-probabilities and gradients are those of one thread to
rounding. The gradients of the parts are added up in the same order each time, so that a run that
is repeated with as many threads has the same bits.
"""
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import torch

from core.model import facts, settings
from core.packing import FAMILIES, hidden_states

SMALL = 2**17  # weights of a layer's MLP matrix; above, the threads share products


def rows_in_threads(model, token_ids, loss_mask):
    """Return what `packing.hidden_states` does: (N, D), and the index (B, T) of each token."""
    threads = min(torch.get_num_threads(), len(token_ids))
    # Random numbers of dropout would be drawn in the order of the threads.
    if threads < 2 or model.training and settings(model) and settings(model).peft["lora_dropout"]:
        return hidden_states(model, token_ids, loss_mask)
    trained = model.base_model.parameters() if torch.is_grad_enabled() else ()
    trained = [p for p in trained if p.requires_grad]
    return _Rows.apply(model, threads, token_ids, loss_mask, *trained)


def use_threads(model):
    """Take the rows of a small model's passes through it in threads."""
    config = model.config
    is_small = config.model_type in FAMILIES and (
        config.hidden_size * config.intermediate_size < SMALL)
    if is_small and model.device.type == "cpu":
        facts(model).hidden_states = rows_in_threads


class _Rows(torch.autograd.Function):
    """`hidden_states` of parts of the rows, each in a thread, with the gradients of parameters."""

    @staticmethod
    def forward(ctx, model, threads, token_ids, loss_mask, *trained):
        parts = zip(token_ids.tensor_split(threads), loss_mask.tensor_split(threads))
        results = in_threads(threads, [partial(pass_of, model, bool(trained), *part)
                                       for part in parts])
        hidden, indices = zip(*results)
        starts = [0]
        for part in hidden[:-1]:
            starts.append(starts[-1] + len(part))
        index = torch.cat([index + start for index, start in zip(indices, starts)])
        ctx.mark_non_differentiable(index)
        ctx.hidden, ctx.trained = hidden, trained
        return torch.cat([part.detach() for part in hidden]), index

    @staticmethod
    def backward(ctx, grad, _):
        grads = grad.split([len(part) for part in ctx.hidden])
        jobs = [partial(torch.autograd.grad, part, ctx.trained, g, allow_unused=True)
                for part, g in zip(ctx.hidden, grads)]
        by_parameter = zip(*in_threads(len(jobs), jobs))
        ctx.hidden = None  # the graphs of the parts are used up
        return None, None, None, None, *(
            None if parts[0] is None else torch.stack(parts).sum(0) for parts in by_parameter)


def pass_of(model, with_graph, token_ids, loss_mask):
    """Return the `hidden_states` of some rows. A thread begins with gradients switched on."""
    with torch.set_grad_enabled(with_graph):
        return hidden_states(model, token_ids, loss_mask)


def in_threads(number: int, jobs: list) -> list:
    """Return what the jobs return, each run in a thread of its own."""
    futures = [pool(number).submit(job) for job in jobs]
    return [future.result() for future in futures]


@cache
def pool(number: int) -> ThreadPoolExecutor:
    """Return threads whose operations each take one thread."""
    return ThreadPoolExecutor(number, initializer=torch.set_num_threads, initargs=(1,))
