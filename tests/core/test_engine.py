"""engine.py against `token_logprobs`, against transformers' generate, and against itself."""
import math
import random
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import core.engine
import layers
import lora
from bench.completions import generate
from core.engine import Row, RowCache
from layers import load_model
from core.logprobs import token_logprobs
from core.tiny import make_tiny
from lora import merged

SMOLLM2 = Path(lora.__file__).parent / ".real" / "smollm2"
VOCAB = 300
SMALL = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
         "pad_token_id": 0}
FAMILIES = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "llama_gqa": ("Llama", {}),
    "llama_mha": ("Llama", {"num_key_value_heads": 6}),
    "smollm": ("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "num_hidden_layers": 3, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 3, "query_pre_attn_scalar": 8,
                          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "phi3": ("Phi3", {}),
}


@pytest.fixture(autouse=True, params=["core", "layers"])
def which(request, monkeypatch):
    """Every test runs with core's engine and with what the layers make of it."""
    if request.param == "core":
        monkeypatch.setattr(layers, "make_engine", core.engine.make_engine)


def make_engine(model, tokens=0, **options):
    return layers.make_engine(model, tokens=tokens, **options)


def build(name, seed=0):
    """A random model of this family, its distributions neither flat nor one-hot."""
    import transformers
    if name == "tiny":
        return make_tiny(seed)[0].eval()
    family, extra = FAMILIES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, family + ("TextConfig" if family == "Gemma3" else "Config"))(**{**SMALL, **extra})
    return getattr(transformers, family + "ForCausalLM")(config).eval()


def complete(model, prompts, *, group_size=1, max_new_tokens=128, seed=0, forced=None, **options):
    """`generate` with an engine of its own."""
    engine = make_engine(model, **options)
    return generate(engine, prompts, group_size=group_size, max_new_tokens=max_new_tokens, seed=seed, forced=forced)


def ids_of(n, seed=0):
    return random.Random(seed).choices(range(3, VOCAB), k=n)


# ------------------------------------------------------------------------------------------------------------ the engine
class Played:
    """One episode as the engine wrote it: ids, mask and log-probs, one entry per token."""
    def __init__(self, prompt, plan):
        self.ids, self.mask, self.logprobs, self.plan = list(prompt), [0] * len(prompt), [0.0] * len(prompt), list(plan)


def play(model, episodes, *, slots, limit=6, stop_ids=(), pause=None, seed=0, hold=lambda row: False, **sampling):
    """Play `episodes`, each (prompt, group, [tokens that answer turn 1, turn 2, ...]), to their ends -> (Played each, engine)."""
    engine = make_engine(model, slots=slots, stop_ids=stop_ids, **sampling)
    engine.forwarded, run = 0, engine.run  # tokens that go through the model

    def count(rows):
        engine.forwarded += sum(len(row.pending) for row in rows)
        return run(rows)
    engine.run = count
    played = [Played(prompt, plan) for prompt, _, plan in episodes]
    rows = [Row(prompt, group=group, seed=seed * 1000 + i, limit=limit) for i, (prompt, group, _) in enumerate(episodes)]
    of, paused = dict(zip(rows, played)), []
    engine.add(rows)
    while engine.busy or paused:
        for row in engine.step() if engine.busy else []:
            episode = of[row]
            assert 1 <= len(row.turn) <= limit and len(row.turn) == len(row.logprobs)
            assert len(row.turn) == limit or row.turn[-1] in stop_ids
            assert not set(row.turn[:-1]) & set(stop_ids)
            episode.ids += row.turn
            episode.mask += [1] * len(row.turn)
            episode.logprobs += row.logprobs
            if episode.plan:
                paused.append((engine.clock + (pause(row) if pause else 0), row))
            else:
                engine.release(row)
        due = [row for at, row in paused if at <= engine.clock or not engine.busy]
        paused = [(at, row) for at, row in paused if row not in due]
        for row in due:
            ids = of[row].plan.pop(0)
            of[row].ids += ids
            of[row].mask += [0] * len(ids)
            of[row].logprobs += [0.0] * len(ids)
            engine.extend(row, ids, limit)
    assert not engine.waiting and not engine.prompts and engine.owner == [None] * slots  # nothing is left behind
    return played, engine


def recomputed(model, played, temperature=1.0):
    """The largest difference between what the sampler noted and what the trainer finds on the stored ids."""
    width = max(len(e.ids) for e in played)
    def pad(x, value):
        return torch.tensor([list(getattr(e, x)) + [value] * (width - len(e.ids)) for e in played])
    with torch.no_grad():
        logprobs, _ = token_logprobs(model, pad("ids", 0), pad("mask", 0), temperature)
    return (logprobs - pad("logprobs", 0.0)).abs()


def schedule(seed, count=11):
    """Episodes with shared and single prompts, ragged prompts and answers, up to three turns."""
    rng, episodes = random.Random(seed), []
    while len(episodes) < count:
        group, prompt = object(), ids_of(rng.choice([1, 2, 9, 14, 30]), rng.random())
        for _ in range(rng.choice([1, 2, 5])):
            episodes.append((prompt, group, [ids_of(rng.choice([1, 3, 8, 21]), rng.random()) for _ in range(rng.choice([0, 1, 2]))]))
    return episodes[:count]


@pytest.mark.parametrize("name", [*FAMILIES, "tiny"])
def test_sampled_logprobs_are_the_trainers(name):
    model = build(name)
    for slots, temperature, stops in ((4, 1.0, set(range(0, VOCAB, 9))), (11, 0.7, ())):
        played, _ = play(model, schedule(slots), slots=slots, limit=7, temperature=temperature, stop_ids=stops, pause=lambda row: len(row.turn) % 3)
        assert max(len(e.ids) for e in played) > 40  # longer than the sliding windows by far
        assert recomputed(model, played, temperature).max() < 1e-4
        assert {len(e.plan) for e in played} == {0} and sum(sum(e.mask) for e in played) > 60
        shifted = [Played(e.ids, []) for e in played]
        for e, s in zip(played, shifted):
            s.mask, s.logprobs = [0] + e.mask[:-1], [0.0] + e.logprobs[:-1]
        assert recomputed(model, shifted, temperature).max() > 0.1  # the check itself sees a shift by one


@pytest.mark.parametrize("name", ["tiny", "gemma3", "smollm"])
def test_with_lora_merged_or_as_a_hook(name):
    model = build(name)
    model.requires_grad_(False)
    lora.add_lora(model, 4, 8)
    for linear in lora.adapted_linears(model).values():
        torch.nn.init.normal_(linear.lora.B, std=0.1)
    with merged(model):
        first, _ = play(model, schedule(1), slots=3)
        model_changed = recomputed(build(name), first).max()
    second, _ = play(model, schedule(1), slots=3)
    assert model_changed > 1e-2
    assert recomputed(model, first).max() < 1e-4 and recomputed(model, second).max() < 1e-4
    model.train()  # the update continues: the engine has left no inference tensor behind
    logprobs, _ = token_logprobs(model, torch.tensor([first[0].ids]), torch.tensor([first[0].mask]))
    logprobs.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_transformers_greedy(name):
    model = build(name)
    model.generation_config.eos_token_id = None
    prompts = [ids_of(n, n) for n in (1, 5, 13, 30)]
    ours = complete(model, prompts, max_new_tokens=24, slots=3, temperature=0)
    for prompt, (ids, _) in zip(prompts, ours):
        theirs = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                                max_new_tokens=24, pad_token_id=0, use_cache=True)
        assert ids == theirs[0, len(prompt):].tolist()


@pytest.mark.parametrize("slots", [1, 2, 5, 9])
def test_a_groups_prompt_is_forwarded_once(slots):
    prompts, group_size, limit = [ids_of(17, 0), ids_of(4, 1), ids_of(9, 2)], 5, 4
    episodes = [(prompt, i, []) for i, prompt in enumerate(prompts) for _ in range(group_size)]
    model = build("qwen2")
    played, engine = play(model, episodes, slots=slots, limit=limit)
    # A turn of n tokens forwards n - 1 of them: the first comes from the prompt's logits, nobody reads on after the last.
    assert engine.forwarded == sum(map(len, prompts)) + len(episodes) * (limit - 1)
    assert recomputed(model, played).max() < 1e-4


def test_a_prompt_is_kept_only_while_rows_of_its_group_wait(monkeypatch):
    """The copies of an evaluation's 128 prompts took 2.2 GiB at 0.5B, beside the cache for which `slots_that_fit` had given half of the memory."""
    engine, kept = make_engine(build("qwen2"), slots=6), []
    monkeypatch.setattr(engine.cache, "views", lambda length, real=engine.cache.views: kept.append(len(engine.prompts)) or real(length))
    engine.add([Row(ids_of(5, i), group=min(i, 4), limit=1) for i in range(9)])
    engine.step()
    assert kept == [0, 1] * 5 and list(engine.prompts) == [4]


def test_nothing_is_forwarded_twice_over_turns():
    episodes = schedule(7)
    played, engine = play(build("qwen2"), episodes, slots=3)
    once = {id(group): len(prompt) for prompt, group, _ in episodes}
    assert engine.forwarded == sum(once.values()) + sum(len(e.ids) - len(p) - 1 for e, (p, *_) in zip(played, episodes))


@pytest.mark.parametrize("name", ["tiny", "gemma3"])
def test_slots_order_and_mates_do_not_change_what_is_drawn(name):
    model, prompts = build(name), [ids_of(n, n) for n in (3, 11, 11, 26, 7)]
    runs = [complete(model, prompts, group_size=3, max_new_tokens=20, slots=slots, stop_ids={9, 50}, seed=4) for slots in (1, 2, 5, 7, 64)]
    for run in runs[1:]:
        assert [ids for ids, _ in run] == [ids for ids, _ in runs[0]]
        assert max(abs(a - b) for (_, x), (_, y) in zip(run, runs[0]) for a, b in zip(x, y)) < 1e-4
    rows = [Row(prompts[i // 3], group=i // 3, seed=(4 << 40) + i, limit=20) for i in range(15)]
    shuffled = random.Random(0).sample(rows, 15)
    engine = make_engine(model, slots=4, stop_ids={9, 50})
    engine.add(shuffled)
    while engine.busy:
        for row in engine.step():
            engine.release(row)
    assert [row.turn for row in rows] == [ids for ids, _ in runs[0]]
    alone = complete(model, prompts[:1], group_size=3, max_new_tokens=20, stop_ids={9, 50}, seed=4)
    assert [ids for ids, _ in alone] == [ids for ids, _ in runs[0][:3]]
    other = complete(model, prompts, group_size=3, max_new_tokens=20, stop_ids={9, 50}, seed=5)
    assert [ids for ids, _ in other] != [ids for ids, _ in runs[0]]


def test_forced_tokens_are_taken_and_their_logprobs_returned():
    model, prompts, forced = build("qwen2"), [ids_of(5, 0), ids_of(9, 1)], [ids_of(8, i) for i in range(4)]
    before = [list(x) for x in forced]
    out = complete(model, prompts, group_size=2, max_new_tokens=8, forced=forced, slots=3, temperature=0.7)
    assert [ids for ids, _ in out] == before == forced  # and the caller's lists are untouched
    for i, (ids, logprobs) in enumerate(out):
        sequence = torch.tensor([prompts[i // 2] + ids])
        mask = torch.tensor([[0] * len(prompts[i // 2]) + [1] * 8])
        assert (token_logprobs(model, sequence, mask, 0.7)[0][0, -8:] - torch.tensor(logprobs)).abs().max() < 1e-4
    mine = ids_of(3)
    row = Row(prompts[0], forced=mine, limit=3)
    engine = make_engine(model, slots=1)
    engine.add([row])
    while engine.busy:
        engine.step()
    assert row.turn == mine and len(mine) == 3


def test_forced_and_sampled_rows_share_a_batch():
    model, prompt = build("qwen2"), ids_of(6)
    free = complete(model, [prompt], max_new_tokens=6, seed=1)[0]
    rows = [Row(prompt, group=0, seed=1 << 40, limit=6), Row(prompt, group=0, seed=9, limit=6, forced=[7, 8])]
    engine = make_engine(model, slots=2)
    engine.add(rows)
    while engine.busy:
        engine.step()
    assert rows[0].turn == free[0] and rows[1].turn[:2] == [7, 8] and len(rows[1].turn) == 6  # then it samples on
    assert max(abs(a - b) for a, b in zip(rows[0].logprobs, free[1])) < 1e-5


@pytest.mark.parametrize("stop", [11, 22, 33])
def test_every_stop_id_ends_a_turn_and_is_part_of_it(stop):
    model, prompt = build("qwen2"), ids_of(6)
    ids, logprobs = complete(model, [prompt], max_new_tokens=9, stop_ids={11, 22, 33}, forced=[[5, 6, stop, 7, 8]])[0]
    assert ids == [5, 6, stop] and len(logprobs) == 3
    first = complete(model, [prompt], max_new_tokens=9, stop_ids={11, 22, 33}, forced=[[stop, 5]])[0]
    assert first[0] == [stop]  # the very first token too


def test_limits():
    model, prompts = build("qwen2"), [ids_of(6), ids_of(3)]
    for limit in (1, 2, 5):
        assert all(len(ids) == limit for ids, _ in complete(model, prompts, group_size=3, max_new_tokens=limit, slots=4))
    assert complete(model, []) == []
    engine, row = make_engine(model, slots=1), Row(prompts[0], limit=2)
    engine.add([row])
    ended = []
    while not ended:
        ended = engine.step()
    engine.extend(row, [5, 6], 4)
    assert row.turn == [] and engine.busy
    ended = []
    while not ended:
        ended = engine.step()
    assert len(row.turn) == 4  # every turn has its own limit


def test_rows_that_wait_for_a_tool_do_not_stop_others():
    model, prompt = build("qwen2"), ids_of(6)
    rows = [Row(prompt, group=i, seed=i, limit=2 if i == 0 else 30) for i in range(3)]
    engine = make_engine(model, slots=2)
    engine.add(rows)
    ended = []
    while rows[0] not in ended:
        ended += engine.step()
    for _ in range(80):  # row 0 waits in its slot; row 1 ends, row 2 takes its place and ends
        if engine.busy:
            for row in engine.step():
                ended.append(row)
                engine.release(row)
    assert ended == rows and not engine.busy and rows[0].state == "ended" and rows[0].slot is not None
    first, second = Row(prompt, limit=1), Row(prompt, limit=1)
    engine.add([first, second])
    assert engine.step() == [first] and engine.waiting == [second]
    assert not engine.busy  # steps that do nothing would move the clock, by which tool results are due
    engine.release(first)
    assert engine.busy and engine.step() == [second]
    engine.release(second)
    engine.extend(rows[0], [7], 3)
    assert engine.busy
    while engine.busy:
        ended += engine.step()
    assert len(rows[0].turn) == 3 and ended[-1] is rows[0]
    engine.release(rows[0])
    assert engine.owner == [None, None] and not engine.prompts


def test_a_row_that_waits_keeps_its_place_in_the_cache_while_others_move():
    model = build("gemma3")
    episodes = [(ids_of(n, n), object(), [ids_of(5, n), ids_of(2, n)]) for n in (20, 3, 9, 1, 14, 6, 30)]
    for wait in (0, 1, 5, 50):
        played, _ = play(model, episodes, slots=4, limit=5, stop_ids=set(range(0, VOCAB, 7)), pause=lambda row: wait if row.group is episodes[0][1] else wait // 2)
        assert recomputed(model, played).max() < 1e-4


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_the_cache_grows_beyond_its_first_size(name):
    model = build(name)
    played, engine = play(model, [(ids_of(50, 1), 0, [ids_of(70, 2)]), (ids_of(3, 3), 1, [ids_of(1, 4)])], slots=2, limit=40)
    assert engine.cache.capacity > 128 and engine.cache.capacity % 32 == 0
    assert recomputed(model, played).max() < 1e-4


def test_the_cache_has_room_for_tokens_and_not_for_padding():
    """A long row that gets one token beside a prompt of 90: padded to 90, it would reach 190."""
    cache = RowCache(2, torch.device("cpu"))
    cache.prepare([0, 1], [100, 0], [1, 90])
    assert cache.capacity == 128 and cache.position.shape == (2, 90) and cache.position.max() == 127
    model, rows = build("qwen2"), [(ids_of(100, 1), 0, [ids_of(1, 2)]), (ids_of(3, 3), 1, [ids_of(90, 4)])]
    played, engine = play(model, rows, slots=2, limit=4)
    assert engine.cache.capacity == 128
    assert recomputed(model, played).max() < 1e-4


def test_short_rows_after_a_long_one_read_a_part_of_the_positions():
    """A server's cache stays as large as its longest conversation was."""
    model, prompt = build("qwen2"), ids_of(20, 1)
    turns = []
    for long in (0, 400):
        engine = make_engine(model, slots=2)
        if long:
            engine.add([Row(ids_of(long, 2), limit=1)])
            for row in engine.step():
                engine.release(row)
        row = Row(prompt, limit=4, seed=3)
        engine.add([row])
        while engine.busy:
            engine.step()
        turns.append((row.turn, row.logprobs))
        assert engine.cache.span == 32
    assert engine.cache.capacity > 400
    assert turns[0][0] == turns[1][0] and turns[0][1] == pytest.approx(turns[1][1], abs=1e-5)


def test_many_refills_leave_nothing_behind():
    model = build("qwen2")
    engine = make_engine(model, slots=3, stop_ids=set(range(0, VOCAB, 5)))
    for turn in range(4):
        engine.add([Row(ids_of(5, i), group=(turn, i // 4), seed=i, limit=5) for i in range(16)])
        while engine.busy:
            for row in engine.step():
                engine.release(row)
        assert not engine.prompts and not engine.waiting and engine.owner == [None] * 3
        assert engine.cache.capacity == 32 and all(t.shape[0] == 3 for t in engine.cache.tensors.values())


def test_the_attention_of_the_model_is_restored():
    model, prompt = build("gemma3"), torch.tensor([ids_of(20)])
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            before = model(prompt).logits
        engine = make_engine(model, slots=2)
        engine.add([Row(ids_of(9), limit=3)])
        engine.step()
        assert model.config._attn_implementation == implementation

        def breaks(*_):
            raise MemoryError("in the middle of a forward")

        hook = model.model.layers[1].register_forward_hook(breaks)
        with pytest.raises(MemoryError):
            engine.step()
        hook.remove()
        assert model.config._attn_implementation == implementation
        with torch.no_grad():
            assert torch.equal(model(prompt).logits, before)


def test_bf16_runs_and_its_logprobs_are_near_the_trainers():
    for name in ("tiny", "qwen3"):
        model = build(name)
        for p in model.parameters():
            p.data = p.data.bfloat16()
        played, engine = play(model, schedule(3), slots=4)
        difference = recomputed(model, played)
        assert engine.cache.tensors[0, "key"].dtype == torch.bfloat16 and difference.max() < 0.5
        assert difference.sum() / sum(sum(e.mask) for e in played) < 0.05


def test_a_long_prefill_is_split_and_draws_the_same(monkeypatch):
    """Its intermediate values would fill a GPU. One row is never split."""
    model, prompts = build("qwen2"), [ids_of(n, n) for n in (20, 9, 30, 4, 100)]
    whole = complete(model, prompts, max_new_tokens=5, slots=5)
    sizes = []

    def prefilled(ids, cache):
        sizes.append(ids.shape)
        return decoder(ids, cache)
    engine = make_engine(model, slots=5)
    decoder, engine.decoder = engine.decoder, prefilled
    prefilled.head = decoder.head
    monkeypatch.setattr("core.engine.LONG", 64)
    split = generate(engine, prompts, group_size=1, max_new_tokens=5, seed=0, forced=None)
    assert [ids for ids, _ in split] == [ids for ids, _ in whole]
    assert sorted(width for _, width in sizes if width > 1) == [4, 20, 30, 100] and all(rows * width <= 64 or rows == 1 for rows, width in sizes)


def test_not_finite_weights_stop_the_engine():
    model = build("qwen2")
    model.model.norm.weight.data[0] = math.nan
    engine = make_engine(model, slots=1)
    engine.add([Row([1, 2])])
    with pytest.raises(FloatingPointError):
        engine.step()
    assert model.config._attn_implementation != "row_attention"


def test_the_head_of_the_sampler_is_the_head_of_the_trainer():
    import transformers
    for family, extra in (("Cohere", {"logit_scale": 0.25}), ("Granite", {"logits_scaling": 3.0})):
        torch.manual_seed(0)
        model = getattr(transformers, family + "ForCausalLM")(getattr(transformers, family + "Config")(**{**SMALL, **extra})).eval()
        played, _ = play(model, schedule(2, 5), slots=3)
        assert recomputed(model, played).max() < 1e-4
        with torch.no_grad():  # and both are the model's own
            exact = F.log_softmax(model(torch.tensor([played[0].ids])).logits[0, :-1], -1)
        at = torch.tensor(played[0].mask[1:]).bool()
        assert (exact.gather(1, torch.tensor(played[0].ids)[1:, None])[:, 0] - torch.tensor(played[0].logprobs[1:]))[at].abs().max() < 1e-4


@pytest.fixture(scope="module")
def smollm2():
    return load_model(str(SMOLLM2), device="cpu", lora_r=2, lora_target_modules="q_proj")


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no .real/smollm2")
def test_smollm2(smollm2):
    model, tokenizer = smollm2
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "2 + 2 =")]
    with torch.no_grad():
        (ids, _), _ = complete(model, prompts, max_new_tokens=8, temperature=0)
        theirs = model.generate(torch.tensor([prompts[0]]), attention_mask=torch.ones(1, len(prompts[0]), dtype=torch.long), do_sample=False,
                                max_new_tokens=8, eos_token_id=None, pad_token_id=0)
        assert ids == theirs[0, len(prompts[0]):].tolist()
    played, _ = play(model, [(prompts[0], 0, [tokenizer.encode("\nAnd of Spain?")]), (prompts[0], 0, []), (prompts[1], 1, [])], slots=2, limit=8)
    assert recomputed(model, played).max() < 1e-3


def test_the_fused_kernel_reads_no_more_of_a_prompt_than_there_is():
    """A static engine's cache has room for a whole episode from the first step on."""
    spans = {}
    for sdpa, room in ((False, 150), (False, 1000), (True, 150)):
        cache = RowCache(2, torch.device("cpu"))
        cache.sdpa = sdpa
        cache.reserve(room)
        cache.prepare([0, 1], [0, 3], [40, 2])
        keys, values = cache.update(*torch.randn(2, 2, 1, 40, 4), 0)
        spans[sdpa, room] = keys.shape[2], values.shape[2], cache.span, int(cache.position.max())
    # Of 64, 160 are less than three times as many, and 1,024 are more.
    assert spans == {(False, 150): (160, 160, 160, 42), (False, 1000): (64, 64, 64, 42), (True, 150): (64, 64, 64, 42)}


def test_rows_that_are_exchanged_write_no_further_than_they_reach():
    """Beyond, a CPU's pages are no memory yet: a server's would fill by and by."""
    cache = RowCache(3, torch.device("cpu"))
    cache.reserve(64)
    cache.prepare([0, 1, 2], [0, 0, 0], [5, 5, 5])
    keys, values = cache.update(*torch.randn(2, 3, 1, 5, 4), 0)
    before, tensor = keys.clone(), cache.tensors[0, "key"]
    tensor[:, :, 5:] = torch.arange(3.0).view(3, 1, 1, 1)
    cache.exchange([0], [2], 5)
    assert torch.equal(tensor[[2, 1, 0], :, :5], before[:, :, :5])
    assert torch.equal(tensor[:, 0, 5:, 0], torch.arange(3.0)[:, None].expand(3, 59))
