"""Policies of a few numbers that play: who sampled, what is forgotten, and credit over turns.

As in toys.py, a function returns a row of numbers for each arm, and draws by the seed alone.
"""
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402
from agent import Trajectory  # noqa: E402
from bench.toys import GROUP, logit, loss_of, mean_of_last, step, thin  # noqa: E402

import torch  # noqa: E402
from torch.nn.functional import logsigmoid  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402


# ---------------------------------------------------------- words of a few tokens, and who samples
WORD, LETTERS, WORDS = 6, 8, 24  # tokens of an episode, choices of a token, tasks
PLAY_STEPS, PLAY_RATE, PLAY_PASSES = 60, 0.1, 2
AGES = 2, 4, 8  # steps
# C of each --importance_mode. That of the geometric mean is of one token.
CAPS = {"token_truncate": 2.0, "token_mask": 2.0, "sequence_truncate": 2.0, "sequence_mask": 2.0,
        "geometric_mask": 1.2}


def spell(seed, sampler_of, correction=None) -> dict:
    """Train a table of letters to spell each task's word, on what another policy has sampled.

    The reward is the share of right letters. Every letter is chosen by itself, from LETTERS. The
    sampler's logits are sampler_of(past tables), the oldest first. correction: None takes the ratio
    to the sampler, and another one is an --importance_mode: the ratio is taken to the trainer, and
    advantages are multiplied by weights.
    """
    torch.manual_seed(seed)
    target = torch.randint(LETTERS, (WORDS, WORD))
    table = (torch.randn(WORDS, WORD, LETTERS) / 2).requires_grad_()
    optimizer = torch.optim.Adam([table], lr=PLAY_RATE)
    tasks = torch.arange(WORDS).repeat_interleave(GROUP)
    mask = torch.ones(len(tasks), WORD)
    past, rewards, gaps, narrow, left_out = [], [], [], [], []
    for _ in range(PLAY_STEPS):
        past.append(table.detach().clone())
        log_sampler = sampler_of(past).log_softmax(-1)[tasks]  # (B, WORD, LETTERS)
        letters = torch.multinomial(log_sampler.exp().flatten(0, 1), 1).view(-1, WORD)
        sampled_logprobs = log_sampler.gather(2, letters[..., None])[..., 0]  # (B, WORD)
        reward = (letters == target[tasks]).float().mean(1)
        now = table.detach().softmax(-1).gather(2, target[..., None]).mean().item()
        rewards.append(now)  # of the policy that trains, exactly
        advantages = grpo.group_advantages(reward, tasks)[:, None] * mask
        trainer = logprobs_of(table, tasks, letters).detach()
        gaps.append((trainer - sampled_logprobs).abs().mean().item())
        ratio = (trainer - sampled_logprobs).mean(1).exp()  # gspo's, (B,)
        narrow.append(((ratio < 1 - 3e-4) | (ratio > 1 + 4e-4)).float().mean().item())
        old = sampled_logprobs if correction is None else trainer
        if correction:
            advantages, shares = grpo.weighted(
                advantages, trainer, sampled_logprobs, mask, CAPS[correction], correction)
            left_out.append(shares["importance_left_out"])
        for _ in range(PLAY_PASSES):
            step(optimizer, loss_of("grpo", logprobs_of(table, tasks, letters), advantages, mask,
                                    old))
    row = {"reward": rewards[-1], "half way": rewards[PLAY_STEPS // 2],
           "gap": mean_of_last(gaps, PLAY_STEPS), "outside gspo": mean_of_last(narrow, PLAY_STEPS),
           "curve": thin(rewards)}
    return row | ({"left out": mean_of_last(left_out, PLAY_STEPS)} if left_out else {})


def logprobs_of(table, tasks, letters):
    """Return the log-probabilities (B, WORD) of letters."""
    return table.log_softmax(-1)[tasks].gather(2, letters[..., None])[..., 0]


def staleness(seed) -> dict:
    """Spell with episodes of the newest policy, and of one AGES steps ago, by each correction."""
    def policy_of(age):
        return lambda past: past[max(0, len(past) - 1 - age)]
    fresh = spell(seed, policy_of(0))
    rows = {"new episodes": {f"at age {age}": fresh["half way"] for age in AGES}}
    rows["new episodes"]["curve"] = fresh["curve"]
    for correction in (None, *(mode for mode in CAPS if mode in grpo.CORRECTIONS)):
        runs = {age: spell(seed, policy_of(age), correction) for age in AGES}
        row = {f"at age {age}": run["half way"] for age, run in runs.items()}
        last = runs[AGES[-1]]
        row |= {"at the end, age 8": last["reward"], "left out, age 8": last.get("left out", 0.0)}
        rows[correction or "no correction"] = row | {"curve": last["curve"]}
    return rows


def engine(seed) -> dict:
    """Spell with another engine: logits rounded to bfloat16, to float8, or divided by 1.2.

    The last is no rounding but a mistake: a sampler that divides by another temperature.
    """
    def rounded(dtype):
        return lambda past: past[-1].to(dtype).float()

    def hotter(past):
        return past[-1] / 1.2
    mode = "token_truncate"
    return {"the same": spell(seed, lambda past: past[-1]),
            "bfloat16": spell(seed, rounded(torch.bfloat16)),
            "float8": spell(seed, rounded(torch.float8_e4m3fn)),
            "float8, corrected": spell(seed, rounded(torch.float8_e4m3fn), mode),
            "temperature 1.2": spell(seed, hotter),
            "temperature 1.2, corrected": spell(seed, hotter, mode)}


# --------------------------------------------------------------------------------------- forgetting
FEATURES, PROMPTS, ANSWERS = 64, 48, 8  # of each of two subjects
USUAL, UNUSUAL = 0.4, 0.02  # chances, at the start, of two answers that are both right
ENOUGH = 0.9  # success on the trained subject, at which training stops
FORGET_RATE = 0.02


def forgetting(seed) -> dict:
    """Train one subject by GRPO and by SFT up to the same success, and ask the other one.

    The policy is linear in features that both subjects share. In the trained subject two answers
    are right: one that the policy gives often, and one that it hardly gives. GRPO may keep its own
    way. The two experts of SFT show the usual answer, or the unusual one.
    """
    torch.manual_seed(seed)
    prompts = torch.randn(2 * PROMPTS, FEATURES) / FEATURES**0.5
    rest = (1 - USUAL - UNUSUAL) / (ANSWERS - 2)
    wanted = torch.full((2 * PROMPTS, ANSWERS), (1 - 0.8) / (ANSWERS - 1))
    wanted[:, 0] = 0.8  # the other subject: answer 0 is right
    wanted[:PROMPTS] = torch.tensor([USUAL, UNUSUAL] + [rest] * (ANSWERS - 2))
    order = torch.stack([torch.randperm(ANSWERS) for _ in wanted])  # which answer is which
    policy = torch.nn.Linear(FEATURES, ANSWERS, bias=False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)

    def log_policy():
        return policy(prompts).log_softmax(1).gather(1, order)  # in the order of `wanted`

    for _ in range(400):
        step(optimizer, -(wanted * log_policy()).sum(1).mean())
    start = {name: p.detach().clone() for name, p in policy.state_dict().items()}
    before = log_policy().detach()
    rows = {"before": {"other subject": before[PROMPTS:, 0].exp().mean().item(), "KL": 0.0,
                       "trained subject": before[:PROMPTS, :2].exp().sum(1).mean().item()}}
    tasks = torch.arange(PROMPTS).repeat_interleave(GROUP)
    for name in ("grpo", "sft, the usual answer", "sft, the unusual answer"):
        policy.load_state_dict(start)
        optimizer = torch.optim.Adam(policy.parameters(), lr=FORGET_RATE)
        others, own = [], []
        while not own or own[-1] < ENOUGH and len(own) < 500:
            now = log_policy()
            others.append(now[PROMPTS:, 0].exp().mean().item())
            own.append(now[:PROMPTS, :2].exp().sum(1).mean().item())
            if name == "grpo":
                drawn = torch.multinomial(now[:PROMPTS].exp().detach(), GROUP, True).flatten()
                advantages = grpo.group_advantages((drawn < 2).float(), tasks)[:, None]
                logprobs = now[tasks, drawn][:, None]
                loss = loss_of("grpo", logprobs, advantages, torch.ones_like(logprobs))
            else:
                loss = -now[:PROMPTS, int("unusual" in name)].mean()
            step(optimizer, loss)
        kl = (before.exp() * (before - now.detach())).sum(1)  # of the policy that was measured
        rows[name] = {"other subject": others[-1], "trained subject": own[-1],
                      "KL": kl[:PROMPTS].mean().item(), "updates": len(own) - 1,
                      "curve": thin(others), "own curve": thin(own)}
    return rows


# ------------------------------------------------------------------------------- credit over turns
LOOKS, SECOND_LOOK = 3, 0.6  # as in clues.py
PRICES = 0.0, 0.05  # of a look
GROUPS = 16  # of a step
CREDIT_STEPS, CREDIT_RATE = 60, 0.1


def look_or_guess(chances, shows, rng):
    """Play one episode of clues.py. Returns the looks before each turn, the choices, success."""
    states, looked = [], []
    for looks in range(LOOKS):
        states.append(looks)
        looked.append(rng.random() < chances[looks])
        if not looked[-1]:
            return states, looked, rng.random() < 0.5
        if looks + 1 >= shows:
            break
    return states, looked, True


def look_by(name, seed, price) -> tuple[list[float], list[float]]:
    """Train the chance to look after 0, 1 and 2 looks by a credit. Returns success and looks."""
    rng = random.Random(seed)
    table = logit([0.5] * LOOKS).requires_grad_()
    optimizer = torch.optim.Adam([table], lr=CREDIT_RATE)
    success, looks = [], []
    for _ in range(CREDIT_STEPS):
        chances = torch.sigmoid(table).tolist()
        episodes, played = [], []
        for group in range(GROUPS):
            shows = 2 if rng.random() < SECOND_LOOK else LOOKS
            for _ in range(GROUP):
                states, looked, right = look_or_guess(chances, shows, rng)
                rewards = [-price * look for look in looked]
                rewards[-1] += right
                episodes.append(Trajectory(rewards=rewards, group_id=group,
                                           info={"states": states, "success": right}))
                played.append((torch.tensor(states), torch.tensor(looked)))
        success.append(sum(t.info["success"] for t in episodes) / len(episodes))
        looks.append(sum(looked.sum().item() for _, looked in played) / len(episodes))
        turns = [len(t.rewards) for t in episodes]
        advantages = pad_sequence(grpo.CREDITS[name](episodes).split(turns), True)  # (B, T)
        states, looked = (pad_sequence(x, True) for x in zip(*played))
        mask = (torch.arange(advantages.shape[1]) < torch.tensor(turns)[:, None]).long()
        logprobs = torch.where(looked, logsigmoid(table[states]), logsigmoid(-table[states]))
        step(optimizer, loss_of("dapo", logprobs * mask, advantages, mask))
    return success, looks


LUCK, LUCK_TURNS, LUCK_STEPS, LUCK_RATE = 0.6, 4, 120, 0.05
LUCK_GROUPS = 2  # of a step


def good_turns_by(name, seed) -> float:
    """Train the chance of a good turn in an easy and in a hard place. Returns it in the hard one.

    A coin puts an episode into one of them. Of the good turns' share g it succeeds with chance
    LUCK + (1 - LUCK) g in the easy place, and with (1 - LUCK) g in the hard one: there most
    episodes fail, however good their turns are. Returned is the mean over the last half.
    """
    rng = random.Random(seed)
    table = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=LUCK_RATE)
    in_the_hard_place = []
    for _ in range(LUCK_STEPS):
        chances = torch.sigmoid(table).tolist()
        in_the_hard_place.append(chances[1])
        episodes, good = [], []
        for group in range(LUCK_GROUPS):
            for _ in range(GROUP):
                place = int(rng.random() < 0.5)
                good.append([rng.random() < chances[place] for _ in range(LUCK_TURNS)])
                chance = (1 - LUCK) * sum(good[-1]) / LUCK_TURNS + LUCK * (place == 0)
                rewards = [0.0] * (LUCK_TURNS - 1) + [float(rng.random() < chance)]
                episodes.append(Trajectory(rewards=rewards, group_id=group,
                                           info={"states": [place] * LUCK_TURNS}))
        advantages = grpo.CREDITS[name](episodes).view(-1, LUCK_TURNS)
        logits = torch.stack([table[t.info["states"]] for t in episodes])  # (B, LUCK_TURNS)
        logprobs = torch.where(torch.tensor(good), logsigmoid(logits), logsigmoid(-logits))
        step(optimizer, loss_of("dapo", logprobs, advantages, torch.ones_like(logprobs)))
    return mean_of_last(in_the_hard_place, LUCK_STEPS // 2)


def credit(seed) -> dict:
    """Learn to look by each credit that grpo.py has, and to do good turns in a hard place.

    A look is free, or costs 0.05. To look until the answer is shown is right in both: success 1 in
    place of 0.5 for at most three looks.
    """
    rows = {}
    for name in ("episode", "turn", "return", "process", "gigpo"):
        if name in grpo.CREDITS:
            success, looks = look_by(name, seed, PRICES[0])
            priced, _ = look_by(name, seed, PRICES[1])
            rows[name] = {"success": mean_of_last(success), "looks": mean_of_last(looks),
                          "success at a price of 0.05": mean_of_last(priced),
                          "good turns in the hard place": good_turns_by(name, seed),
                          "curve": thin(success), "looks curve": thin(looks)}
    return rows


GAMES = {"staleness": staleness, "engine": engine, "credit": credit, "forgetting": forgetting}
