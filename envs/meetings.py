"""Is this meeting worth having? A conference lasts three days; two attendees have a time slot.

The prompt shows roles, seniority, meetings had and the slot. What decides is behind four tools.
Each gives a score: odd from -3 to 3, but for the interests, which are even from -4 to 4. Every fact
that is true counts +1, every other -1:

    profile_match     you seek their role, they seek yours, their seniority is the one you want
    common_interests  2 (shared - 2): each has four of eight topics
    slot_fit          you have more energy left than meetings had, so have they, the hour is in your
                      half of the day
    follow_up         you leave after this day, so do they, you live in the same city

    P(good) = 1 / (1 + exp(-0.8 (profile_match + common_interests + slot_fit + follow_up)))

The outcome is drawn with that probability. Everything is drawn from the meeting's number, so the
number in a CSV row is the whole task. No agent can be right more often than `_ceiling()`, 83 %; two
scores allow 70 %, the prompt alone 59 %.

The answer is text: {"probability": 0.69, "reason": "slot", "recommendation": "YES"}. TRL shows an
environment no text: there every episode counts as not completed.

    python envs/meetings.py --rows 2000 --output meetings.csv
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
WEIGHT = 0.8
# Each persona: the tools in the order in which its demonstrations look, by their place in TOOLS.
PERSONAS = {"bold": "032", "careful": "2301", "quick": "320", "curious": "1032",
            "strict": "0213", "friendly": "1320", "thorough": "01230"}
FORMAT = 'Answer {"probability": 0.xx, "reason": "word", "recommendation": "YES|NO"}'
COLUMNS = ("input_text", "target_probability", "target_reason", "ground_truth_prob")


# -------------------------------------------------------------------------------- the simulator
def draw_attendee(rng) -> dict:
    """Draw a person of the conference."""
    return {
        "role": int(rng.integers(4)), "senior": int(rng.integers(2)), "met": int(rng.integers(6)),
        "energy": int(rng.integers(7)),
        "interests": set(rng.choice(8, 4, replace=False).tolist()),
        "seeks": set(rng.choice(4, 2, replace=False).tolist()),
        "wants": int(rng.integers(2)), "morning": bool(rng.integers(2)),
        "leaves": int(rng.integers(1, 5)), "city": int(rng.integers(2)),
    }


def simulate(meeting: int) -> dict:
    """Return all there is to know of a meeting: prompt, scores, probability, outcome, persona."""
    rng = np.random.default_rng(meeting)
    you, they = draw_attendee(rng), draw_attendee(rng)
    day, hour = int(rng.integers(1, 4)), int(rng.integers(6))
    facts = {
        "profile_match": (they["role"] in you["seeks"], you["role"] in they["seeks"],
                          they["senior"] == you["wants"]),
        "slot_fit": (you["energy"] > you["met"], they["energy"] > they["met"],
                     you["morning"] == (hour < 3)),
        "follow_up": (you["leaves"] > day, they["leaves"] > day, you["city"] == they["city"]),
    }
    scores = {name: 2 * sum(true) - 3 for name, true in facts.items()}
    scores["common_interests"] = 2 * len(you["interests"] & they["interests"]) - 4
    scores = {name: scores[name] for name in TOOLS}
    probability = 1 / (1 + math.exp(-WEIGHT * sum(scores.values())))
    people = ", ".join(f"{LEVELS[a['senior']]} {ROLES[a['role']]} met {COUNTS[a['met']]}"
                       for a in (you, they))
    prompt = f"Meeting {meeting}, day {DAYS[day - 1]} at {HOURS[hour]}: {people}."
    return {"prompt": prompt, "scores": scores, "probability": probability,
            "outcome": bool(rng.random() < probability),
            "persona": tuple(PERSONAS)[rng.integers(len(PERSONAS))]}


def _sums(*distributions: dict) -> dict:
    """Return the distribution of the sum of independent scores: score -> probability."""
    out = {}
    for terms in product(*(distribution.items() for distribution in distributions)):
        total = sum(score for score, _ in terms)
        out[total] = out.get(total, 0.0) + math.prod(p for _, p in terms)
    return out


def _facts(*chances: float) -> dict:
    """Return the distribution of a score of facts that are true with these chances."""
    return _sums(*({1: p, -1: 1 - p} for p in chances))


def _follow_up() -> dict:
    """Return the distribution of `follow_up`, which depends on the day."""
    days = [_facts(1 - day / 4, 1 - day / 4, 0.5) for day in (1, 2, 3)]
    return {score: sum(day.get(score, 0) / 3 for day in days) for score in FAIR}


FAIR = _facts(0.5, 0.5, 0.5)
PRIOR = {
    "profile_match": FAIR,
    # Energy is 0 to 6, meetings had 0 to 5: half of the pairs have more energy than meetings.
    "slot_fit": FAIR,
    # Of the 70 choices of 4 topics out of 8, so many share k.
    "common_interests": {2 * k - 4: math.comb(4, k) ** 2 / 70 for k in range(5)},
    "follow_up": _follow_up(),
}


def belief(seen: dict) -> float:
    """Return P(good | these scores), the mean over what the other tools would say.

    What the prompt says of the meeting is left out.
    """
    rest = _sums(*(PRIOR[name] for name in TOOLS if name not in seen))
    known = sum(seen.values())
    return sum(p / (1 + math.exp(-WEIGHT * (known + score))) for score, p in rest.items())


def accuracy(tools) -> float:
    """Return how often the best guess from these tools' scores is right: E[max(p, 1 - p)]."""
    total = 0.0
    for scores in product(*(PRIOR[name] for name in tools)):
        seen = dict(zip(tools, scores))
        p = belief(seen)
        total += max(p, 1 - p) * math.prod(PRIOR[name][score] for name, score in seen.items())
    return total


# ------------------------------------------------------------------------ answers and CSV rows
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


def read_columns(row: dict) -> tuple[str, float, str, float]:
    """Return the text, target probability, one-word reason and true probability of a CSV row."""
    if missing := [name for name in COLUMNS if name not in row]:
        raise ValueError(f'no "{missing[0]}" column; has: {", ".join(row)}')
    text, reason = row["input_text"].strip(), row["target_reason"].strip()
    if not text:
        raise ValueError('"input_text" is empty')
    if not re.fullmatch(r"\w[\w-]*", reason):
        raise ValueError(f'"target_reason" must be one word, not {reason[:40]!r}')
    numbers = []
    for name in ("target_probability", "ground_truth_prob"):
        try:
            numbers.append(float(row[name]))
        except ValueError:
            raise ValueError(f'"{name}" must be a number, not {row[name][:40]!r}') from None
        if not 0 <= numbers[-1] <= 1:
            raise ValueError(f'"{name}" must be from 0 to 1, not {row[name][:40]}')
    return text, numbers[0], reason, numbers[1]


def read_probability(text: str) -> float | None:
    """Return the probability of the last {...} in an answer, None if it is not a whole answer."""
    try:
        read = json.loads(re.findall(r"\{[^{}]*\}", text)[-1])
        probability, reason = read["probability"], read["reason"]
        is_whole = "recommendation" in read and re.fullmatch(r"\w[\w-]*", reason)
        if is_whole and type(probability) in (int, float) and 0 <= probability <= 1:
            return probability
    except (IndexError, KeyError, TypeError, ValueError, RecursionError):
        pass
    return None


class Meetings:
    """Find out, with two to five calls, whether a meeting will be good; then recommend it or not.

    The reward is the course's: -1.0 for no recommendation, -0.75 for no answer, -0.5 without a
    tool, -0.25 for an answer that cannot be read, 1.0 if right, 0.1 if wrong. `shaped` (a column,
    or the environment meetings_shaped) adds 0.05 for the first use of a tool, -0.05 for any further
    one, and 0.25 - (probability - outcome)^2. That is Brier's score, which the true probability
    makes highest in the mean.
    """

    system_prompt = FORMAT  # of every episode: its persona's
    max_turns = 6
    limits = {"max_new_tokens": 64, "max_tokens": 1024}
    shaped = False

    def reset(self, meeting: int, noise: float = 0.0, seed: int = 0, shaped: bool | None = None,
              **_) -> str:
        """Begin with a meeting's number.

        `noise` is how often the expert stops after two scores, and how often it recommends against
        what it saw.
        """
        made = simulate(meeting)
        self.system_prompt = f"You are a {made['persona']} agent. {FORMAT}"
        self.scores, self.outcome = made["scores"], made["outcome"]
        self.probability = made["probability"]
        self.done, self.reward = False, 0.0
        self.recommended, self.seen = None, {}
        self._shaped = self.shaped if shaped is None else shaped
        self._reward_parts = {"outcome": -0.75}
        if self._shaped:
            self._reward_parts.update(tools=0.0, calibration=0.0)
        rng = np.random.default_rng([seed, meeting])
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
            self._reward_parts["tools"] += -0.05 if name in self.seen else 0.05
            self.reward = self._reward_parts["tools"]
        self.seen[name] = self.scores[name]
        return self.seen[name]

    def _reply(self, text: str) -> None:
        """Grade the answer: the last {...} in the text. This ends the episode."""
        self.done = True
        named = set(re.findall(r'"recommendation"\s*:\s*"(YES|NO)"', text))
        self.recommended = named == {"YES"} if len(named) == 1 else None
        probability = read_probability(text)
        self._reward_parts["outcome"] = self._outcome_reward(probability)
        if self._shaped and probability is not None:
            self._reward_parts["calibration"] = 0.25 - (probability - self.outcome) ** 2

    def _outcome_reward(self, probability) -> float:
        if self.recommended is None:
            return -1.0
        if not self.seen:
            return -0.5
        if probability is None:
            return -0.25
        return 1.0 if self._check() else 0.1

    def _expert(self) -> list[dict] | str:
        """Return the next call in the persona's order, then the answer."""
        if self.done:
            return []
        if self._plan:
            return [{"name": self._plan[0], "arguments": {}}]
        p = belief(self.seen)
        return answer(p, strongest(self.seen, p >= 0.5), self._contrary)

    def _check(self) -> bool:
        """Return whether the recommendation came true. On average no agent passes `_ceiling`."""
        return self.recommended is not None and self.recommended == self.outcome

    @staticmethod
    def _ceiling() -> float:
        return accuracy(TOOLS)

    @staticmethod
    def _tasks(split: str, n: int | None, seed: int) -> list[dict]:
        """Return n distinct meetings. A tenth of all, by their hash, is the test split."""
        rng, out = np.random.default_rng([seed, split == "test"]), {}
        while len(out) < (10_000 if n is None else n):
            meeting = int(rng.integers(100_000, 1_000_000))
            if (zlib.crc32(str(meeting).encode()) % 10 == 0) == (split == "test"):
                out[meeting] = {"meeting": meeting}
        return list(out.values())

    @staticmethod
    def _row(row: dict) -> dict:
        """Return the task of {"meeting": 482107}, or of a CSV row that the simulator wrote."""
        if "meeting" in row:
            number = row["meeting"]
            if type(number) is not int or not 0 <= number < 2**63:
                raise ValueError('"meeting" must be a number such as 482107, not '
                                 f"{str(number)[:40]!r}")
            return row
        text, *_, probability = read_columns(row)
        match = re.match(r"Meeting ([1-9]\d{5}),", text, re.ASCII)
        if not match:
            raise ValueError('"input_text" does not begin "Meeting 482107,": to imitate, '
                             "not to play")
        made = simulate(int(match[1]))
        if made["prompt"] != text or abs(made["probability"] - probability) > 0.01:
            raise ValueError(f"not what the simulator makes of meeting {match[1]}")
        return {"meeting": int(match[1])}


class MeetingsShaped(Meetings):
    """With reward for looking and for calibration."""

    shaped = True


def write_csv(path: str, rows: int, split: str, seed: int) -> float:
    """Write meetings of a split with their true answers. Return the share of good ones."""
    good = 0
    with open(path, "w", encoding="utf-8", newline="") as f:
        out = csv.writer(f)
        out.writerow(COLUMNS)
        for task in Meetings._tasks(split, rows, seed):
            made = simulate(task["meeting"])
            truth = made["probability"]
            target = json.loads(answer(truth, strongest(made["scores"], truth >= 0.5)))
            out.writerow([made["prompt"], target["probability"], target["reason"], round(truth, 4)])
            good += made["outcome"]
    return good / rows


def main():
    """Write a CSV file of meetings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--output", default="meetings.csv")
    parser.add_argument("--split", choices=("train", "test"), default="train",
                        help="no meeting is in both")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if not 1 <= given.rows <= 80_000 or given.seed < 0:
        parser.error("--rows must be from 1 to 80000, --seed 0 or more")
    try:
        share = write_csv(given.output, given.rows, given.split, given.seed)
    except OSError as error:
        parser.error(f"--output {given.output}: {error.strerror}")
    print(f"written: {given.output}: {given.rows} meetings, {share:.1%} of them good\n"
          f"best possible accuracy: {accuracy(TOOLS):.1%} with all tools, "
          f"{accuracy(TOOLS[:2]):.1%} with two\n"
          f"next:    python sft.py --env meetings --dataset {given.output}")


if __name__ == "__main__":
    main()
