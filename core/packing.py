"""Equal rows go through the model once, and rows that begin alike as one packed row."""
import torch

from core.model import facts

FAMILIES = {"llama", "qwen2", "qwen3"}  # known to take packed rows; others are tried


def allow_packing(model):
    """Let a model of FAMILIES take packed rows."""
    if model.config.model_type in FAMILIES and model.config._attn_implementation == "sdpa":
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
        AttentionInterface.register("packed_attention", packed_attention)
        AttentionMaskInterface.register("packed_attention", sdpa_mask)
        model.set_attn_implementation("packed_attention")
        facts(model).shares_prefix = True


def hidden_states(model, token_ids, loss_mask):
    """Return the last hidden states (N, D) and the index (B, T) of each token's own among them.

    Equal rows, which a sure policy repeats, go through once, R of B. So does a prefix of P tokens
    that all share: the model sees one packed row [prefix, row 1 .. row R], whose positions continue
    the prefix's, and N is P + R (T - P). Equal rows share what dropout draws, and so does a prefix.
    """
    rows, row = distinct(token_ids)  # (R, T), (B, 1)
    P = shared_prefix(model, rows, loss_mask)
    R, T = rows.shape
    column = torch.arange(T, device=rows.device)
    if not P:
        hidden = model.base_model(input_ids=rows, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1), row * T + column
    packed = torch.cat([rows[0, :P], rows[:, P:].flatten()])  # (N,)
    positions = torch.cat([column[:P], column[P:].repeat(R)])  # (N,)
    # Without a mask transformers would make one, square in all of the row's tokens.
    no_mask = rows.new_ones(1, 1, 1, 1)
    hidden = model.base_model(
        input_ids=packed[None], position_ids=positions[None], use_cache=False,
        attention_mask=no_mask, shared_prefix=(P, R)).last_hidden_state[0]  # (N, D)
    return hidden, torch.where(column < P, column, row * (T - P) + column)


def distinct(token_ids):
    """Return the rows (R, T) that differ, and which of them each row (B, T) is, as (B, 1)."""
    numbers = {}  # the tokens of a row -> its number among those that differ
    place = [numbers.setdefault(tuple(row), len(numbers)) for row in token_ids.tolist()]
    if len(numbers) == len(place):  # then no copy has to reach a GPU
        return token_ids, torch.arange(len(place), device=token_ids.device)[:, None]
    rows = token_ids[[place.index(number) for number in range(len(numbers))]]
    return rows, torch.tensor(place, device=token_ids.device)[:, None]


def shared_prefix(model, token_ids, loss_mask) -> int:
    """Return the length of the prompt that all rows (R, T) share, before the mask's first 1.

    It is 0 where the model cannot continue from a prefix, or less than a tenth of all is saved.
    """
    R, T = token_ids.shape
    window = getattr(model.config.get_text_config(), "sliding_window", None) or T
    if not facts(model).shares_prefix or window < T:
        return 0
    alike = (token_ids == token_ids[0]).all(0) & (loss_mask == 0).all(0)  # (T,)
    length = int(alike.long().cumprod(0).sum())
    return length if (R - 1) * length >= 0.1 * R * T else 0


def packed_attention(module, query, key, value, attention_mask, shared_prefix=None, **kwargs):
    """Attend by transformers' own kernel, in the signature of its attention functions.

    With a `shared_prefix` (P, R) the batch is one packed row, (1, H or H_kv, P + R W, D): each of
    the R rows sees the prefix and itself.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    if not shared_prefix:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    P, R = shared_prefix
    prefix, rows = zip(*(x.split([P, x.shape[2] - P], 2) for x in (query, key, value)))
    first, _ = sdpa_attention_forward(module, *prefix, None, **kwargs)  # (1, P, H, D)
    q, k, v = (unpack(x, R) for x in rows)  # (R, H or H_kv, W, D)
    k, v = after(prefix[1], k), after(prefix[2], v)  # (R, H_kv, P + W, D)
    W, S = q.shape[2], k.shape[2]
    mask = torch.ones(W, S, dtype=torch.bool, device=q.device).tril(S - W)[None, None]
    tail, _ = sdpa_attention_forward(module, q, k, v, mask, **kwargs)  # (R, W, H, D)
    return torch.cat([first, tail.flatten(0, 1)[None]], 1), None


def unpack(x, R):
    """Return (R, H, W, D) of the rows that lie one behind the other in x (1, H, R * W, D)."""
    return x[0].unflatten(1, (R, -1)).transpose(0, 1)


def after(prefix, x):
    """Return the rows x (R, H, T, D), each with the prefix (1, H, P, D) in front."""
    return torch.cat([prefix.expand(len(x), -1, -1, -1), x], 2)
