"""Meetings at a conference: find out whether a meeting will be good, then recommend it or not.

The prompt shows two attendees' roles, seniority and number of meetings, and the time slot. What
decides is behind four tools. Each gives a score, which counts +1 for every fact that is true and -1
for every other; for the interests it is 2 (shared - 2), where each has four of eight topics.

    profile_match     you seek their role, they seek yours, their seniority is the one you want
    common_interests  the topics that both have
    slot_fit          you have more energy left than meetings had, so have they, the hour is in your
                      half of the day
    follow_up         you leave after this day, so do they, you live in the same city

    P(good) = 1 / (1 + exp(-0.8 (profile_match + common_interests + slot_fit + follow_up)))

The outcome is drawn with that probability. Everything is drawn from the number of the meeting. No
agent can be right more often than `accuracy(TOOLS)`, 83 %. Two scores allow 70 %, the prompt alone
59 %.

The answer is text: {"probability": 0.69, "reason": "slot", "recommendation": "YES"}. TRL shows an
environment no text, so that there every episode counts as not completed.
"""
import argparse
import csv
import json
import math
import re
import zlib
from itertools import product

import numpy as np

ROLES = ("founder", "investor", "engineer", "researcher")
LEVELS = ("junior", "senior")
DAYS = ("one", "two", "three")
HOURS = ("nine", "ten", "eleven", "one", "two", "three")  # the first three are in the morning
COUNTS = ("none", "one", "two", "three", "four", "five")
REASONS = {"profile_match": "profile", "common_interests": "interests", "slot_fit": "slot",
           "follow_up": "potential"}
TOOLS = tuple(REASONS)
# How likely each score is. Of the 70 choices of 4 topics out of 8, comb(4, k)^2 share k topics.
# Whether people stay after today depends on the day: three of four do on day one, one on day three.
FAIR = {-3: 1 / 8, -1: 3 / 8, 1: 3 / 8, 3: 1 / 8}
PRIOR = {
    "profile_match": FAIR,
    "common_interests": {-4: 1 / 70, -2: 16 / 70, 0: 36 / 70, 2: 16 / 70, 4: 1 / 70},
    "slot_fit": FAIR,
    "follow_up": {-3: 7 / 48, -1: 17 / 48, 1: 17 / 48, 3: 7 / 48},
}
# Each persona: the tools in the order in which its demonstrations look, by their place in TOOLS.
PERSONAS = {"bold": "032", "careful": "2301", "quick": "320", "curious": "1032",
            "strict": "0213", "friendly": "1320", "thorough": "01230"}
FORMAT = 'Answer {"probability": 0.xx, "reason": "word", "recommendation": "YES|NO"}'
WORD = r"\w[\w-]*"
MAX_TASKS = 80_000  # of the 90,000 meetings of the test split


# -------------------------------------------------------------------------------- the simulator
def draw_attendee(rng) -> dict:
    """Draw a person of the conference."""
    return {
        "role": rng.integers(4), "senior": rng.integers(2), "met": rng.integers(6),
        "energy": rng.integers(7),
        "interests": set(rng.choice(8, 4, replace=False)),
        "seeks": set(rng.choice(4, 2, replace=False)),
        "wants": rng.integers(2), "morning": rng.integers(2) == 1,
        "leaves": rng.integers(1, 5), "city": rng.integers(2),
    }


def simulate(meeting: int) -> dict:
    """Return all there is to know of a meeting: prompt, scores, probability, outcome, persona."""
    rng = np.random.default_rng(meeting)
    you, they = draw_attendee(rng), draw_attendee(rng)
    day, hour = rng.integers(1, 4), rng.integers(6)
    scores = {
        "profile_match": score(they["role"] in you["seeks"], you["role"] in they["seeks"],
                               they["senior"] == you["wants"]),
        "common_interests": 2 * len(you["interests"] & they["interests"]) - 4,
        "slot_fit": score(you["energy"] > you["met"], they["energy"] > they["met"],
                          you["morning"] == (hour < 3)),
        "follow_up": score(you["leaves"] > day, they["leaves"] > day, you["city"] == they["city"]),
    }
    probability = logistic(scores.values())
    people = ", ".join(f"{LEVELS[a['senior']]} {ROLES[a['role']]} met {COUNTS[a['met']]}"
                       for a in (you, they))
    prompt = f"Meeting {meeting}, day {DAYS[day - 1]} at {HOURS[hour]}: {people}."
    return {"prompt": prompt, "scores": scores, "probability": probability,
            "outcome": bool(rng.random() < probability),
            "persona": tuple(PERSONAS)[rng.integers(len(PERSONAS))]}


def score(*facts: bool) -> int:
    """Return the number of true facts less the number of false ones."""
    return 2 * int(sum(facts)) - len(facts)


def logistic(scores) -> float:
    """Return the probability that a meeting with these four scores is good."""
    return 1 / (1 + math.exp(-0.8 * sum(scores)))


def possible(tools):
    """Yield everything that these tools may say, tool -> score, and how likely it is."""
    for scores in product(*(PRIOR[name] for name in tools)):
        said = dict(zip(tools, scores))
        yield said, math.prod(PRIOR[name][score] for name, score in said.items())


def belief(seen: dict) -> float:
    """Return P(good | these scores), the mean over what the other tools may say.

    What the prompt says of the meeting is left out.
    """
    total = 0.0
    for said, chance in possible([name for name in TOOLS if name not in seen]):
        total += chance * logistic([*seen.values(), *said.values()])
    return total


def accuracy(tools) -> float:
    """Return how often the best guess from these tools' scores is right: E[max(p, 1 - p)]."""
    total = 0.0
    for said, chance in possible(tools):
        p = belief(said)
        total += chance * max(p, 1 - p)
    return total


# ------------------------------------------------------------------------------------- answers
def answer(probability: float, reason: str, contrary: bool = False) -> str:
    """Return the final answer, with a probability of two digits from 0.01 to 0.99.

    The recommendation is YES from 0.50 on as written, or the contrary of it.
    """
    p = min(max(round(probability, 2), 0.01), 0.99)
    yes = "YES" if (p >= 0.5) != contrary else "NO"
    return f'{{"probability": {p:.2f}, "reason": "{reason}", "recommendation": "{yes}"}}'


def strongest(scores: dict, yes: bool) -> str:
    """Return the reason: which of these scores speaks most for the recommendation."""
    return REASONS[max(scores, key=lambda name: scores[name] if yes else -scores[name])]


def read_probability(text: str) -> float | None:
    """Return the probability of the last {...} in an answer, None if it is not a whole answer."""
    try:
        read = json.loads(re.findall(r"\{[^{}]*\}", text)[-1])
        probability = read["probability"]
        is_whole = "recommendation" in read and re.fullmatch(WORD, read["reason"])
        if is_whole and type(probability) in (int, float) and 0 <= probability <= 1:
            return probability
    except (IndexError, KeyError, TypeError, ValueError, RecursionError):
        pass
    return None


class Meetings:
    """Find out, with two to five calls, whether a meeting will be good; then recommend it or not.

    The reward is the course's: -1.0 for no recommendation, -0.75 for no answer, -0.5 without a
    tool, -0.25 for an answer that cannot be read, 1.0 if right, 0.1 if wrong. `shaped` adds 0.05
    for the first use of a tool, -0.05 for any further one, and 0.25 - (probability - outcome)^2.
    That is Brier's score, which the true probability makes highest in the mean.
    """

    system_prompt = FORMAT  # of every episode: its persona's
    max_turns = 6
    limits = {"max_new_tokens": 64, "max_tokens": 1024}

    def reset(self, meeting: int, noise: float = 0.0, noise_seed: int = 0,
              shaped: bool = False, **_) -> str:
        """Begin with a meeting's number.

        `noise` is how often the expert stops after two scores, and how often it recommends against
        what it saw. `noise_seed` decides when.
        """
        made = simulate(meeting)
        self.system_prompt = f"You are a {made['persona']} agent. {FORMAT}"
        self.scores = made["scores"]
        self.outcome = made["outcome"]
        self.done = False
        self.reward = 0.0
        self.recommended = None
        self.seen = {}
        self._reward_parts = {"outcome": -0.75}
        if shaped:
            self._reward_parts.update(tools=0.0, calibration=0.0)
        self._shaped = shaped
        rng = np.random.default_rng([noise_seed, meeting])
        order = PERSONAS[made["persona"]]
        if rng.random() < noise:
            order = order[:2]
        self._plan = [TOOLS[int(i)] for i in order]
        self._contrary = bool(rng.random() < noise)
        return made["prompt"]

    # ------------------------------------------------------------------------------- the tools
    def profile_match(self) -> str:
        """How well the two profiles match, -3 to 3."""
        return f"profile match: {self._look('profile_match')}"

    def common_interests(self) -> str:
        """How many interests the two share, as a score, -4 to 4."""
        return f"common interests: {self._look('common_interests')}"

    def slot_fit(self) -> str:
        """How well the time slot fits the energy of both, -3 to 3."""
        return f"slot fit: {self._look('slot_fit')}"

    def follow_up(self) -> str:
        """How likely something follows from the meeting, -3 to 3."""
        return f"follow up potential: {self._look('follow_up')}"

    def get_reward(self) -> float:
        return sum(self._reward_parts.values())

    # --------------------------------------------------------------------------- the mechanics
    def _look(self, name) -> int:
        if self._plan[:1] == [name]:
            self._plan.pop(0)
        if self._shaped:
            self.reward += -0.05 if name in self.seen else 0.05
            self._reward_parts["tools"] = self.reward
        self.seen[name] = self.scores[name]
        return self.seen[name]

    def _reply(self, text: str) -> None:
        """Grade the answer: the last {...} in the text. This ends the episode."""
        self.done = True
        named = set(re.findall(r'"recommendation"\s*:\s*"(YES|NO)"', text))
        self.recommended = named == {"YES"} if len(named) == 1 else None
        probability = read_probability(text)
        if self._shaped and probability is not None:
            self._reward_parts["calibration"] = 0.25 - (probability - self.outcome) ** 2
        if self.recommended is None:
            outcome = -1.0
        elif not self.seen:
            outcome = -0.5
        elif probability is None:
            outcome = -0.25
        else:
            outcome = 1.0 if self._check() else 0.1
        self._reward_parts["outcome"] = outcome

    def _expert(self) -> list[dict] | str:
        """Return the next call in the persona's order, then the answer."""
        if self.done:
            return []
        if self._plan:
            return [{"name": self._plan[0], "arguments": {}}]
        p = belief(self.seen)
        return answer(p, strongest(self.seen, round(p, 2) >= 0.5), self._contrary)

    def _check(self) -> bool:
        """Return whether the recommendation came true."""
        return self.recommended == self.outcome

    @staticmethod
    def _row(row: dict) -> dict:
        """Return a row of a task file, or raise ValueError if its meeting is no number."""
        if "meeting" in row and (type(row["meeting"]) is not int or row["meeting"] < 0):
            raise ValueError(f'"meeting" must be a whole number, not {row["meeting"]!r:.40}')
        return row

    @staticmethod
    def _conversation(row: dict) -> list[dict]:
        """Return a row {input_text, target_probability, target_reason} as question and answer."""
        columns = ("input_text", "target_probability", "target_reason")
        text, stated, reason = (str(row[name]).strip() for name in columns)
        try:
            probability = float(stated)
        except ValueError:
            probability = math.nan
        if not 0 <= probability <= 1:
            raise ValueError(f'"target_probability" must be from 0 to 1, not {stated[:40]}')
        if not text:
            raise ValueError('"input_text" is empty')
        if not re.fullmatch(WORD, reason):
            raise ValueError(f'"target_reason" must be one word, not {reason[:40]!r}')
        return [{"role": "user", "content": text},
                {"role": "assistant", "content": answer(probability, reason)}]

    @staticmethod
    def _tasks(split: str, n: int | None, seed: int) -> list[dict]:
        """Return n distinct meetings. A tenth of all, by their hash, is the test split."""
        rng = np.random.default_rng([seed, split == "test"])
        out = {}
        while len(out) < min(10_000 if n is None else n, MAX_TASKS):
            meeting = int(rng.integers(100_000, 1_000_000))
            if (zlib.crc32(str(meeting).encode()) % 10 == 0) == (split == "test"):
                out[meeting] = {"meeting": meeting}
        return list(out.values())


CSV_COLUMNS = ("input_text", "target_probability", "target_reason", "ground_truth_prob", "meeting")


def write_csv(rows: int, output: str, seed: int):
    """Write meetings of the training split with their true answers."""
    tasks = Meetings._tasks("train", rows, seed)
    with open(output, "w", encoding="utf-8", newline="") as f:
        table = csv.writer(f)
        table.writerow(CSV_COLUMNS)
        for task in tasks:
            made = simulate(task["meeting"])
            truth = made["probability"]
            target = json.loads(answer(truth, strongest(made["scores"], truth >= 0.5)))
            table.writerow([made["prompt"], target["probability"], target["reason"], round(truth, 4), task["meeting"]])


def main():
    """Write a CSV file of meetings."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--output", default="meetings.csv")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        write_csv(**vars(given))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"written: {given.output}; the best possible accuracy is {accuracy(TOOLS):.1%}\n"
          f"next:    python sft.py --env meetings --tasks {given.output}")


if __name__ == "__main__":
    main()
