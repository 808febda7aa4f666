"""Self-teaching: the teacher is the policy itself, with the tool's verdict in its prompt (SDPO).

    python lessons/09_self_teaching.py --seed 0

A reward of 0 says that an answer failed. A tool often says more, in text. In SDPO (arXiv
2601.20802) the policy answers a question x by y, without any verdict. Then the tool's
verdict f goes into the prompt, and the same model says of every token of y what it would
have written, had it known. The policy moves there:

    loss = sum over t of KL( pi(. | x, y before t)  ||  sg pi(. | x, f, y before t) )

The task is to write 4 letters in a secret alphabet: a guess is right once in 20,736. The
model learns to read verdicts first, in a school whose answers are random.
"""
import argparse
import copy
from functools import partial

from picture import draw
from start import report

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import Qwen3Config, Qwen3ForCausalLM

from core.model import adamw, scheduled

NAME = "09_self_teaching"
STEPS, SCHOOL_STEPS = 300, 400
TASKS, GROUP = 8, 8  # a step asks 8 questions, 8 times each
PUPILS = 64  # prompts of each kind in a step of the school
LETTERS, LENGTH = 12, 4  # of the alphabet, and of a question
HELD_OUT = 256  # questions that are never trained on
LEARNING_RATE, MAX_GRAD_NORM = 2e-3, 1.0
TOKENS = [*"abcdefghijkl", "question:", "answer:", "tried:", "verdict:", "right:",
          "+", "-", "solved", "wrong", "yes", "no"]  # the school never uses the last two
ID = {token: i for i, token in enumerate(TOKENS)}
SHAPE = {"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 192,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


# ------------------------------------------------------------------------- the verdicts
# What the tool says of an answer. tried, right: (B, LENGTH) letters.
def marks(tried, right, yes="+", no="-"):
    """Say of every letter whether it is right."""
    return ["tried:", tried, "verdict:", torch.where(tried == right, ID[yes], ID[no])]


def one_word(tried, right):
    """Say only whether all letters are right."""
    solved = (tried == right).all(1, keepdim=True)
    return ["tried:", tried, "verdict:", torch.where(solved, ID["solved"], ID["wrong"])]


def answer(tried, right):
    """Say what would have been right."""
    return ["right:", right]


def prompt(question, verdict=()):
    """Return the ids (B, T) of a question, with a verdict or without."""
    parts = ["question:", question, *verdict, "answer:"]
    return torch.cat([torch.full((len(question), 1), ID[part]) if isinstance(part, str) else part
                      for part in parts], 1)


# -------------------------------------------------------------------- the two equations
def self_teaching_loss(logp, teacher_logp):
    """KL(policy || sg teacher), a mean over the letters; both (B, LENGTH, V).

    It is a policy gradient: any token that may stand there has A = log teacher - log policy.
    """
    return (logp.exp() * (logp - teacher_logp.detach())).sum(2).mean()


def grpo_loss(logp, tried, rewards):
    """-A log pi of the letters, as lessons/02_grpo.py at ratio 1. rewards: (TASKS, GROUP)."""
    std, mean = torch.std_mean(rewards, 1, keepdim=True)
    advantages = ((rewards - mean) / (std + 1e-4)).view(-1, 1)
    return -(advantages * logp.gather(2, tried[..., None])[..., 0]).mean()


# ---------------------------------------------------------------------------- the model
def logprobs(model, question, letters, verdict=()):
    """Return log pi of every token at the places of the letters, (B, LENGTH, V)."""
    token_ids = torch.cat([prompt(question, verdict), letters], 1)
    return model(token_ids, use_cache=False).logits[:, -LENGTH - 1:-1].log_softmax(2)


@torch.no_grad()
def sample(model, question, verdict=()):
    """Return LENGTH sampled tokens for each question."""
    token_ids = prompt(question, verdict)
    for _ in range(LENGTH):
        probs = model(token_ids, use_cache=False).logits[:, -1].softmax(1)
        token_ids = torch.cat([token_ids, torch.multinomial(probs, 1)], 1)
    return token_ids[:, -LENGTH:]


def school():
    """Return a model that reads three verdicts. Questions, attempts and answers are random."""
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True, initializer_range=0.06))
    optimizer = adamw(model, lr=LEARNING_RATE)
    for step in range(SCHOOL_STEPS):
        optimizer.param_groups[0]["lr"] = scheduled(LEARNING_RATE, step, SCHOOL_STEPS)
        for kind in (None, marks, one_word, answer):
            question, right, tried = torch.randint(LETTERS, (3, PUPILS, LENGTH))
            # Half of the letters are right, or half of the attempts.
            same = torch.rand(PUPILS, LENGTH if kind is marks else 1) < 0.5
            verdict = kind(torch.where(same, right, tried), right) if kind else ()
            logp = logprobs(model, question, right, verdict).gather(2, right[..., None])
            (-logp.mean()).backward()
        update(model, optimizer)
    return model


def update(model, optimizer):
    """Take a step, unless no token has an advantage: AdamW would repeat its last steps."""
    if clip_grad_norm_(model.parameters(), MAX_GRAD_NORM):
        optimizer.step()
    optimizer.zero_grad()


# ----------------------------------------------------------------------------- the loop
RUNS = {"GRPO, solved": "solved", "GRPO, share": "share", "SDPO, one word": one_word,
        "SDPO, strange marks": partial(marks, yes="yes", no="no"), "SDPO, marks": marks,
        "SDPO, marks, live": marks, "SDPO, answer": answer}


def train(model, teacher, kind, secret, questions, steps, seed):
    """Ask, let the tool judge, move; yield the share of right letters and of silent groups."""
    torch.manual_seed(seed)
    optimizer = adamw(model, lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = scheduled(LEARNING_RATE, step, steps)
        # 1. Rollout. The policy knows no verdict.
        drawn = torch.randint(len(questions), (TASKS,)).repeat_interleave(GROUP)
        question = questions[drawn]  # (TASKS x GROUP, LENGTH)
        tried, right = sample(model, question), secret[question]
        hits = (tried == right).float().view(TASKS, GROUP, LENGTH)
        solved, share = hits.amin(2), hits.mean(2)  # (TASKS, GROUP)
        # 2. Advantages of the answers, or a teacher that knows the verdict.
        logp = logprobs(model, question, tried)
        if callable(kind):
            with torch.no_grad():
                teacher_logp = logprobs(teacher, question, tried, kind(tried, right))
            loss = self_teaching_loss(logp, teacher_logp)
        else:
            loss = grpo_loss(logp, tried, solved if kind == "solved" else share)
        # 3. Update.
        loss.backward()
        update(model, optimizer)
        yield {"letters": hits.mean().item(), "silent": (solved.std(1) == 0).float().mean().item()}


def main(steps=STEPS, seed=0):
    """School a model, train it once for each run, show what to look at, and draw it."""
    torch.manual_seed(seed)
    start, secret = school(), torch.randperm(LETTERS)
    questions = torch.cartesian_prod(*[torch.arange(LETTERS)] * LENGTH)  # all of them
    held_out, questions = questions[torch.randperm(len(questions))].tensor_split([HELD_OUT])
    random = torch.randint(LETTERS, held_out.shape)
    half_right = torch.where(torch.arange(LENGTH) % 2 == 0, secret[held_out], random)
    [example, *_] = prompt(held_out, marks(half_right, secret[held_out]))
    print("\nThe teacher is asked:", *(TOKENS[token] for token in example))
    print(f"\nA row is {steps} steps from one start, and an exam on questions that no step asks.\n"
          "In a silent group all are solved or none. \"reads\": of the letters that a verdict\n"
          "calls right, how many the teacher repeats, before and after. Which runs learn?\n\n"
          "run                  right letters  solved  silent groups   reads")
    rows = {}
    for name, kind in RUNS.items():
        model = copy.deepcopy(start)
        teacher = model if name.endswith("live") else start
        log = list(train(model, teacher, kind, secret, questions, steps, seed))
        hits = sample(model, held_out) == secret[held_out]
        row = rows[name] = {key: [round(line[key], 4) for line in log] for key in log[0]}
        row |= {"right": hits.float().mean().item(), "solved": hits.all(1).float().mean().item()}
        if callable(kind):
            said = [sample(who, held_out, kind(random, random)) for who in (start, teacher)]
            row["reads"] = [(letters == random).float().mean().item() for letters in said]
        reads = " to ".join(f"{share:.2f}" for share in row.get("reads", ()))
        print(f"{name:20} {row['right']:13.2f} {row['solved']:7.2f} "
              f"{sum(row['silent']) / steps:14.2f}   {reads}", flush=True)
    names = "GRPO, solved", "SDPO, marks", "SDPO, marks, live"
    reward, best, live = (rows[name]["solved"] for name in names)
    print(f"\nWith marks it solves {best:.0%}, and was never shown an answer. By a reward of 0\n"
          f"or 1 it solves {reward:.0%}, and with a teacher that moves along {live:.0%}.\n")
    size = max(1, steps // 30)  # steps to a point of the picture
    numbers = range(size, steps + 1, size)
    draw(NAME, {"title": "right letters", "x": "step", "y": "share", "legend": "beside", "curves": {
        name: (numbers, [sum(row["letters"][i - size:i]) / size for i in numbers])
        for name, row in rows.items()}})
    report(NAME, seed, {"solved": dict(zip(names, (reward, best, live)))}, steps=steps, runs=rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
