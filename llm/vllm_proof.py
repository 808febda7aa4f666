"""The proof that vLLM servers play the policy which is trained here, before the first episode."""
import torch

from experiment.errors import UserError
from llm.logprobs import token_logprobs
from lora import adapter_tensors, merged

PROMPTS = 4
TOKENS = 16  # sampled after each of them
NOISE = 0.03  # std of what is added to B
# Nats, the mean over sampled tokens. bfloat16 on two machines differs by 0.03 to 0.05; another base
# or an adapter that is not applied by whole nats.
TOLERANCE = 0.25


def prove(servers, model, prompts, sampling):
    """Raise UserError unless all servers play the model's policy. Prints by how much they differ.

    Log-probabilities of sampled turns are compared with ours: of the adapter as it is, and of one
    with random B, which changes them by nats. So an adapter that a server leaves out is found
    before it has learned anything.
    """
    model.eval()
    exact = {name: p.detach().clone() for name, p in adapter_tensors(model).items()}
    plain = difference(servers, model, prompts, sampling)
    changed = 0.0
    if plain < TOLERANCE:
        generator = torch.Generator().manual_seed(0)
        for name, p in adapter_tensors(model).items():
            if "lora_B" in name:
                p.data += NOISE * torch.randn(p.shape, generator=generator).to(p)
        changed = difference(servers, model, prompts, sampling)
        for name, p in adapter_tensors(model).items():
            p.data.copy_(exact[name])
    if max(plain, changed) > TOLERANCE:
        what = "the model without its adapter"
        if not changed:
            what = "another model than --model_path, or one in another form (4-bit)"
        if not changed and sampling["temperature"] != 1:
            what += ", or says raw log-probabilities: start it with --logprobs-mode " \
                    "processed_logprobs"
        raise UserError(f"--sampler: the server plays {what}: log-probabilities differ by "
                        f"{max(plain, changed):.2g} nats, where bfloat16 explains 0.05")
    print(f"sampler: its log-probabilities differ from ours by {plain:.2g} nats, with a random "
          f"adapter by {changed:.2g}")


@torch.no_grad()
def difference(servers, model, prompts, sampling) -> float:
    """Return the mean |difference| of sampled tokens' log-probabilities, of the worst server."""
    servers.load(model)
    worst = 0.0
    for server in range(len(servers.urls)):
        gaps = []
        for prompt in prompts[:PROMPTS]:
            body = {**sampling, "model": servers.name, "prompt": prompt, "max_tokens": TOKENS,
                    "seed": 0}
            ids, theirs = servers.complete(body, server)
            tokens = torch.tensor([prompt + ids], device=model.device)  # (1, T)
            mask = torch.ones_like(tokens)
            mask[:, :len(prompt)] = 0
            with merged(model, update=True):
                ours, _ = token_logprobs(model, tokens, mask, sampling["temperature"])
            gaps.append(ours[0, len(prompt):].cpu() - torch.tensor(theirs))
        worst = max(worst, torch.cat(gaps).abs().mean().item())
    return worst
