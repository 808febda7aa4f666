"""llm/streaming.py: streamed layers give the resident layers' gradients to the bit."""
import pytest
import torch
from memory_helpers import CHECKPOINT, FOUR_BIT, IDS, gradients, load, same

from llm.checkpointing import layers_of
from llm.streaming import Stream


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


def test_each_layer_is_copied_once_a_sweep(tiny, monkeypatch):
    model, copied = load(tiny, CHECKPOINT._replace(stream_layers=True)), []
    fetch = Stream.fetch

    def spy(stream, i):
        copied.extend([i] if stream.holds[i % 2] != i else [])
        fetch(stream, i)
    monkeypatch.setattr(Stream, "fetch", spy)
    gradients(model)
    assert copied == [0, 1, 2, 3, 1, 0] or copied == [2, 3, 1, 0], copied  # up, then down; what is there is not fetched
    copied.clear()
    with torch.inference_mode():
        for _ in range(3):
            model.eval()(input_ids=IDS)
    assert copied.count(3) == 3 and len(copied) <= 13  # Decoding fetches each layer once a sweep, the next sweep's first ahead.


def test_a_slot_that_was_refilled_is_an_error(tiny):
    """Without recomputation the backward pass would multiply by another layer's weights."""
    model = load(tiny, FOUR_BIT._replace(stream_layers=True))
    for layer in layers_of(model):
        layer.gradient_checkpointing = False
    with pytest.raises(RuntimeError, match="inplace"):
        gradients(model)
