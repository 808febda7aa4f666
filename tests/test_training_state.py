"""core/model.py: AdamW in host memory is AdamW, and its state is saved and loaded."""
import torch
from memory_helpers import IDS, gradients, load
from safetensors.torch import save_file

from core.run import load_optimizer, optimizer_tensors
from layers import load_model
from extras.memory.techniques import Techniques
from core.model import adamw


def test_adamw_on_the_host_is_adamw_and_its_state_is_saved(tiny, tmp_path):
    options = {"lr": 1e-2, "beta2": 0.95, "weight_decay": 0.1}
    on_host = Techniques(adamw_on_host=True)
    models = [load(tiny, memory) for memory in ("plain", on_host, on_host)]
    plain, ours, resumed = (adamw(model, **options) for model in models)
    beside = load_model(tiny, lora_r=4, memory=on_host, device="meta")[0]
    assert {p.device.type for p in beside.parameters() if p.requires_grad} == {"cpu"}

    def step(model, optimizer, i):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (i + 1)
        gradients(model, IDS + i)
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    for i in range(3):
        norms = [step(m, o, i) for m, o in zip(models[:2], (plain, ours))]
        assert torch.allclose(*norms, rtol=1e-4)
    for (name, p), (_, q) in zip(models[0].named_parameters(), models[1].named_parameters()):
        assert torch.allclose(p, q, atol=1e-5), name
    trained = [p for p in models[1].parameters() if p.requires_grad]
    save_file(optimizer_tensors(ours), tmp_path / "optimizer.safetensors")
    with torch.no_grad():
        for p, q in zip(trained, (p for p in models[2].parameters() if p.requires_grad)):
            q.copy_(p)
    load_optimizer(resumed, tmp_path / "optimizer.safetensors")
    for i in range(3, 5):
        for model, optimizer in ((models[1], ours), (models[2], resumed)):
            step(model, optimizer, i)
    for p, q in zip(trained, (p for p in models[2].parameters() if p.requires_grad)):
        assert torch.equal(p, q)


def test_adamw_forgets_the_tiny_first_gradients_of_a_fresh_adapter(tiny):
    model = load(tiny, "plain")
    assert adamw(model, lr=1e-3).defaults["betas"] == (0.9, 0.95)
    assert adamw(model, lr=1e-3, beta2=0.999).defaults["betas"] == (0.9, 0.999)
