"""The proof that vLLM servers play the policy which is trained here, before the first episode."""
from contextlib import contextmanager

import torch

from core.config import UserError
from core.logprobs import token_logprobs
from lora import adapter_tensors, merged_to_train, reference

PROMPTS = 4
TOKENS = 16  # sampled after each of them
# Nats, the mean of |difference| over sampled tokens. bfloat16 in two programs differs by 0.03 to
# 0.07; a base that has the adapter merged already, and so plays it twice, has differed by 0.2.
TOLERANCE = 0.1
# Nats that the random adapter shall change, of which a quarter is the tolerance. bfloat16 differs
# by up to 0.12 under it.
CHANGE = 1.0
# std of what is added to B, doubled until it changes so much. An untrained model's probabilities
# hardly depend on its weights: the last std then ends the search.
NOISE = 0.01, 0.02, 0.04, 0.08, 0.16, 0.32


def prove(servers, model, prompts, sampling):
    """Raise UserError unless all servers play the model's policy. Prints by how much they differ.

    Log-probabilities of sampled turns are compared with ours: of the adapter as it is, and of one
    whose B is random. So an adapter that a server leaves out is found before it has learned
    anything.

    Args:
        servers: the `Servers`, which play the adapter as it is.
        prompts: lists of ids. sampling: the body of a request but for its prompt.
    """
    model.eval()
    temperature = sampling["temperature"]
    turns = sample(servers, prompts, sampling)
    gap = check(model, turns, temperature, TOLERANCE)
    with random_adapter(model, turns[servers.urls[0]], temperature) as change:
        name = f"{servers.prefix}-proof"
        servers.publish(model, name)
        turns = sample(servers, prompts, {**sampling, "model": name})
        random_gap = check(model, turns, temperature, change / 4)
    servers.retire(kept=1)
    print(f"sampler: its log-probabilities differ from ours by {gap:.2g} nats, with a random "
          f"adapter by {random_gap:.2g}")


def sample(servers, prompts, sampling) -> dict:
    """Return {url: its turns}. A turn is its prompt, the sampled ids and their logprobs."""
    def turns_of(url):
        turns = []
        for prompt in prompts[:PROMPTS]:
            body = {**sampling, "prompt": prompt, "max_tokens": TOKENS}
            turns.append((prompt, *servers.turn(url, body)))
        return turns

    futures = servers.everywhere(servers.urls, turns_of)
    return {url: future.result() for url, future in futures.items()}


def check(model, turns: dict, temperature: float, tolerance: float) -> float:
    """Return the difference of the worst server, or raise UserError which says what it plays."""
    worst = 0.0
    for url, its_turns in turns.items():
        gap = difference(model, its_turns, temperature)
        worst = max(worst, gap)
        if gap < tolerance:
            continue
        plays = "another model than --model_path, or the same one in another form (4-bit)"
        with reference(model, None):
            if difference(model, its_turns, temperature) < tolerance:
                plays = "the model without its adapter"
        if difference(model, its_turns, 1.0) < tolerance:
            plays = "the model, but says raw log-probabilities; start it with --logprobs-mode " \
                    "processed_logprobs"
        raise UserError(f"--sampler {url}: it plays {plays}: log-probabilities differ by "
                        f"{gap:.2g} nats from ours, where bfloat16 explains 0.07")
    return worst


@torch.no_grad()
def difference(model, turns, temperature: float) -> float:
    """Return the mean of |theirs - ours| over all tokens of the turns, in nats."""
    errors = []
    with merged_to_train(model):
        for prompt, ids, theirs in turns:
            tokens = torch.tensor([prompt + ids], device=model.device)  # (1, T)
            mask = torch.ones_like(tokens)
            mask[:, :len(prompt)] = 0
            ours, _ = token_logprobs(model, tokens, mask, temperature)
            errors.append((ours[0, len(prompt):].cpu() - torch.tensor(theirs)).abs())
    return torch.cat(errors).mean().item()


@contextmanager
def random_adapter(model, turns, temperature: float):
    """Inside the block B is random. Yields by how many nats that moves us from these turns."""
    tensors = [p for name, p in adapter_tensors(model).items() if "lora_B" in name]
    exact = [p.detach().clone() for p in tensors]
    generator = torch.Generator().manual_seed(0)
    try:
        for std in NOISE:
            for p in tensors:
                p.data += std * torch.randn(p.shape, generator=generator).to(p)
            change = difference(model, turns, temperature)
            if change > CHANGE:
                break
        yield change
    finally:
        for p, values in zip(tensors, exact):
            p.data.copy_(values)
