"""extras/memory/streaming.py: streamed layers give the resident layers' gradients to the bit."""
import pytest
import torch
from fake_cuda import cuda
from memory_helpers import CHECKPOINT, FOUR_BIT, IDS, gradients, load, same

from extras.memory.checkpointing import layers_of
from extras.memory.streaming import Stream


def stream_of(model) -> Stream:
    """Return the stream whose `enter` the layers' hooks call."""
    hook, = layers_of(model)[0]._forward_pre_hooks.values()
    return hook.func.__self__


@pytest.mark.parametrize("base", [CHECKPOINT, FOUR_BIT, FOUR_BIT._replace(int8_head=True, mlp_tokens=24)],
                         ids=["checkpoint", "4bit", "int8 and tiles"])
def test_streamed_gradients_are_bit_equal(tiny, base):
    resident, streamed = load(tiny, base), load(tiny, base._replace(stream_layers=True))
    for _ in range(2):  # The second step finds slots that hold what the first one left.
        same(gradients(resident), gradients(streamed), 0)
    assert len(stream_of(streamed).slots) == 2 < len(stream_of(streamed).hosts) == 4
    with torch.inference_mode():
        for ids in (IDS, IDS + 1):
            assert torch.equal(resident.eval()(input_ids=ids).logits, streamed.eval()(input_ids=ids).logits)


def test_each_layer_is_copied_once_a_sweep_while_the_one_before_it_runs(tiny, monkeypatch):
    model, events = load(tiny, CHECKPOINT._replace(stream_layers=True)), []
    fetch = Stream.fetch

    def spy(stream, i):
        events.extend([f"copy {i}"] if stream.holds[i % 2] != i else [])
        fetch(stream, i)
    monkeypatch.setattr(Stream, "fetch", spy)

    def entered(i):
        events.extend([i] if events[-1:] != [i] else [])
    stream = stream_of(model)
    for i, layer in enumerate(layers_of(model)):
        layer.register_forward_pre_hook(lambda *_, i=i: entered(i))
    enter = stream.enter
    stream.enter = lambda i: enter(i) or entered(i)  # the backward pass calls it itself
    gradients(model)
    events.clear()
    before = sum(slot._version for slot in stream.slots)
    gradients(model)
    assert events == [0, "copy 2", 1, "copy 3", 2, 3, "copy 1", 2, "copy 0", 1, 0]  # up, then down; what is there is not copied
    assert sum(slot._version for slot in stream.slots) == before + 4
    events.clear()
    with torch.inference_mode():
        for _ in range(3):
            model.eval()(input_ids=IDS)
    assert events == [0, *["copy 2", 1, "copy 3", 2, "copy 0", 3, "copy 1", 0] * 3][:-2]  # decoding copies each layer once a sweep, the next sweep's first ahead


def test_layers_of_an_odd_number_and_of_different_sizes():
    """The last and the first layer then share a slot, and the first must not come while the last runs."""
    layers = [torch.nn.Linear(3, 5), torch.nn.Linear(5, 9), torch.nn.Linear(9, 3)]
    whole = torch.nn.Sequential(*layers)
    with torch.inference_mode():
        x = torch.randn(2, 3)
        expected = whole(x)
        Stream(layers, torch.device("cpu"))
        assert all(torch.equal(whole(x), expected) for _ in range(3))
    assert all(parameter.storage_offset() * 4 % 64 == 0 for parameter in whole.parameters())  # what kernels read fastest


def test_a_slot_that_was_refilled_is_an_error(tiny):
    """Without recomputation the backward pass would multiply by another layer's weights."""
    model = load(tiny, FOUR_BIT._replace(stream_layers=True))
    for layer in layers_of(model):
        layer.gradient_checkpointing = False
    with pytest.raises(RuntimeError, match="inplace"):
        gradients(model)


def test_pinned_layers_share_blocks(monkeypatch):
    """Torch rounds each block up to a power of two, which was 1.9 times these layers' bytes."""
    blocks = []
    empty = torch.empty

    def spy(*sizes, pin_memory=False, **options):
        if pin_memory:
            blocks.append(sizes[0])
        return empty(*sizes, pin_memory=pin_memory, **options)
    with cuda():
        monkeypatch.setattr(torch, "empty", spy)
        layers = [torch.nn.Linear(33, 64, bias=False) for _ in range(30)]
        stream = Stream(layers, torch.device("cuda", 0))
        monkeypatch.undo()
    needed = 30 * 33 * 64 * 4
    assert sum(map(len, stream.hosts)) == needed and sum(1 << (size - 1).bit_length() for size in blocks) < 1.15 * needed
