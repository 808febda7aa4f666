"""AdamW on the device, or on the CPU for an adapter that stays in host memory."""
import torch
from torch import nn

from llm.memory import techniques_of


def adamw(model, **options):
    """Return AdamW over what trains in the model, in host memory if its techniques say so."""
    weights = [p for p in model.parameters() if p.requires_grad]
    if not techniques_of(model).adamw_on_host:
        return torch.optim.AdamW(weights, **options)
    return HostAdamW(weights, **options)


class HostAdamW(torch.optim.Optimizer):
    """AdamW on the CPU over one flat float32 vector; parameters and gradients are views of it.

    The device then holds no adapter, gradient or moment. The adapter's hook copies A and B of a
    layer over when the layer runs, and autograd brings their gradients back.
    """

    def __init__(self, weights, **options):
        super().__init__(weights, options)
        n = sum(p.numel() for p in weights)
        self.flat = nn.Parameter(torch.empty(n, pin_memory=weights[0].device.type == "cuda"))
        self.flat.grad = torch.zeros(n)
        self.inner = torch.optim.AdamW([self.flat], fused=True, **options)
        self.moments = {"step": torch.zeros(()), "exp_avg": torch.zeros(n),
                        "exp_avg_sq": torch.zeros(n)}
        self.inner.state[self.flat] = self.moments
        self.places = []  # (parameter, its slice of the flat vector)
        start = 0
        for p in weights:
            place = slice(start, start + p.numel())
            start = place.stop
            view = self.flat.data[place].view(p.shape).copy_(p.data)
            # This is p.data = view, which tensors on the meta device do not allow.
            torch.utils.swap_tensors(p, nn.Parameter(view))
            self.places.append((p, place))
            self.state[p] = {"step": torch.zeros(())}
            for key in ("exp_avg", "exp_avg_sq"):
                self.state[p][key] = self.moments[key][place].view(p.shape)
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True):
        """Set all gradients to zero; they stay views of the flat gradient."""
        self.flat.grad.zero_()
        for p, place in self.places:
            p.grad = self.flat.grad[place].view(p.shape)

    @torch.no_grad()
    def step(self):
        """Update the flat vector with the options of the first parameter group."""
        self._adopt_loaded_moments()
        options = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        self.inner.param_groups[0].update(options)
        self.inner.step()
        for p, _ in self.places:
            self.state[p]["step"].copy_(self.moments["step"])

    def _adopt_loaded_moments(self):
        """Copy moments that a resumed run put into the state into the flat vectors."""
        for p, place in self.places:
            state = self.state[p]
            for key in ("exp_avg", "exp_avg_sq"):
                view = self.moments[key][place].view(p.shape)
                if state[key].data_ptr() != view.data_ptr():
                    view.copy_(state[key])
                    state[key] = view
                    self.moments["step"].copy_(state["step"])
