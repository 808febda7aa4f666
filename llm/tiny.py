"""The tiny model, which is what `--model_path tiny` means.

It has random weights, a tokenizer of its own and a Hermes chat template, and it walks the path of a
real Qwen: the same architecture family, ChatML turns, `<tool_call>` JSON. It is small on purpose:
tools are shown by name and parameters alone, the JSON around a call is three tokens, and a number
of two digits is one token, its minus sign included.
"""
import torch

TINY_TEMPLATE = """{%- set first = messages[0] if messages[0].role == 'system' else none %}
{%- if first or tools %}<|im_start|>system
{{ first.content if first else '' }}
{%- if tools %}
<tools>
{%- for tool in tools %}
{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{%- endfor %}
</tools>
{%- endif %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role != 'system' or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# What the byte-level BPE is trained on, besides the numbers from -99 to 99. Each of these is one
# token, so copying one is one step.
TINY_TEXT = """\
system user assistant tool Solve for x with the tools. terms value operation expression answer \
number name query
add_terms subtract_terms multiply_terms divide_terms identify_operation state_answer calculator \
error right wrong yes no
name(terms) name(value) name(operation) name(expression), x + 7 = x/4 - (x) Question: How many? \
You are a helpful agent. Use the tools, then give the answer.
the of and to in is it for on that with as are was be at by this have from or one had not but \
what all were when we there
Action Reward add subtract multiply divide both sides term times over is not equivalent. numbers \
too large. takes must be
Answer bold careful quick curious strict friendly thorough Meeting day one two three four five \
none nine ten eleven senior junior founder investor engineer researcher met profile_match \
common_interests slot_fit follow_up
profile match: common interests: slot fit: follow up potential: reason xx YES NO"""
# The JSON of a call and of an answer in few pieces, then numbers of two digits, words, the rest.
TINY_SPLIT = "|".join([
    r'\n\{"name": "|", "arguments": \{\}\}\n|", "arguments": \{"|"\}\}\n|\([a-z]+\)',
    r'\n(?=\{"probability": )| ?\{"probability": 0\.|, "reason": "|", "recommendation": "|YES\|NO',
    r"-?\d{1,2}|-| ?[A-Za-z_]+|[^\dA-Za-z_-]+"])


def make_tiny(seed: int = 0):
    """A Qwen3 of about 0.9 M random parameters, byte-level tokenizer, ChatML/Hermes template ->
    model, tokenizer.

    Not a Qwen2: transformers 5 opens every folder of type qwen2 with Qwen2's own splitting rules,
    whatever tokenizer.json says.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(TINY_SPLIT), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    markup = ["<tools>", "</tools>", "<tool_call>", "</tool_call>",
              "<tool_response>", "</tool_response>"]
    json = ['\n{"name": "state_answer", "arguments": {"value": "3"}}\n',
            '\n{"name": "slot_fit", "arguments": {}}\n',
            ' {"probability": 0.xx, "reason": "word", "recommendation": "YES|NO"}',
            '{"probability": 0.50', "()"]
    numbers = [str(n) for n in range(-99, 100)] + [f"0{n}" for n in range(10)]
    # Words with and without a space before them.
    texts = [TINY_TEXT.replace("\n", " "), TINY_TEXT.replace(" ", "\n")] * 2
    backend.train_from_iterator(texts + json * 8 + numbers * 2, trainers.BpeTrainer(
        vocab_size=1024, min_frequency=2, special_tokens=control, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    backend.add_tokens(markup)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TINY_TEMPLATE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
            initializer_range=0.06, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, tiny=True))
    return model, tokenizer
