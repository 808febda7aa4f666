"""Investment decisions: which option is worth most, once what the brief hides has been looked up.

An option has a cost today, a cash flow for each year, and a chance that the flows come at all. It
is worth its risk-adjusted net present value, an expected value (rNPV; Stewart, Allison and Johnson
2001, doi:10.1038/nbt0901-813):

    value = chance x sum_t flow_t / (1 + rate)^t - cost

The best option has the highest value of those within the budget and of at least LEAST_CHANCE. All
numbers are behind tools, and each look has a fee. The reward has four parts:

    feasibility    0.25 if the chosen option costs at most the budget
    risk           0.25 if its chance is at least LEAST_CHANCE
    return         0.5 x its value / the best option's, between 0 and 1; 0 if it is not feasible
    fees           -0.01 for each look

    level 1    4 options of 1 year, no interest; all that are feasible cost the same
    level 2    4 options of 3 years        level 3    6 options of 5 years

--env_options level=2 chooses. A case is drawn from its number.
"""
import random
from dataclasses import dataclass
from typing import Literal

from core.data import split_of

FEASIBILITY, RISK, RETURN, FEE = 0.25, 0.25, 0.5, 0.01
LEAST_CHANCE = 70  # percent
NAMES = "one two three four five six".split()
# Level -> options, years, and by how much the costs within the budget differ.
LEVELS = {1: (4, 1, 1), 2: (4, 3, 10), 3: (6, 5, 15)}
# The second best option is worth at most this share of the best, so that rounding decides nothing.
MAX_SECOND = 0.9


@dataclass(frozen=True)
class Case:
    """A decision. Rate and chances are in percent."""

    budget: int
    rate: int
    costs: dict[str, int]
    flows: dict[str, list[int]]  # one for each year
    chances: dict[str, int]

    def value(self, name: str, chance: int | None = None) -> float:
        """Return what an option is worth, with its own chance or another one."""
        flows = enumerate(self.flows[name], 1)
        present = sum(flow / (1 + self.rate / 100) ** year for year, flow in flows)
        return (chance or self.chances[name]) / 100 * present - self.costs[name]

    def is_feasible(self, name: str) -> bool:
        return self.costs[name] <= self.budget

    def is_safe(self, name: str) -> bool:
        return self.chances[name] >= LEAST_CHANCE

    def ranked(self) -> list[str]:
        """Return the options that are feasible and safe, the best first."""
        allowed = [name for name in self.costs if self.is_feasible(name) and self.is_safe(name)]
        return sorted(allowed, key=self.value, reverse=True)


def draw_case(number: int, level: int) -> Case:
    """Return the case of a number. At least two options are allowed, and the best one is clear."""
    rng = random.Random(f"{number} {level}")
    options, years, spread = LEVELS[level]
    while True:
        budget = rng.randrange(20, 45, 5)
        rate, chances = 0, (50, 100)
        if level > 1:
            rate, chances = rng.randint(4, 12), range(40, 100, 5)
        case = Case(budget, rate, {}, {}, {})
        for name in NAMES[:options]:
            is_feasible = rng.random() < 2 / 3
            case.costs[name] = budget - rng.randrange(spread)
            if not is_feasible:
                case.costs[name] = budget + rng.randint(1, budget // 4)
            mean = case.costs[name] / years
            case.flows[name] = [round(mean * rng.uniform(1.1, 1.95)) for _ in range(years)]
            case.chances[name] = rng.choice(chances)
        values = list(map(case.value, case.ranked()))
        if len(values) > 1 and values[0] > 0 and values[1] <= MAX_SECOND * values[0]:
            return case


class Business:
    """Choose the option that is worth most."""

    system_prompt = "Choose the option of the highest value with the tools."
    max_turns = 10
    limits = {"max_new_tokens": 256, "max_tokens": 2048}
    options = {"level": 1}
    option_types = {"level": Literal[1, 2, 3]}

    def reset(self, case: int, level: int = 1, noise: float = 0.0, noise_seed: int = 0, **_) -> str:
        """Begin with the number of a case.

        With probability `noise` the scripted expert decides for another option than the best.
        `noise_seed` decides when.
        """
        self._case = draw_case(case, level)
        self._looks = []  # the tool, or the option whose risk was evaluated
        self._decision = None
        self.done = False
        self._noise = noise
        self._rng = random.Random(f"{noise_seed} {case}")
        return f"Case {case}: which of {' '.join(self._case.costs)}?"

    # ------------------------------------------------------------------------------- the tools
    def analyze_situation(self) -> str:
        """Return the budget, the interest rate, and the lowest chance that an option may have."""
        self._looks.append("analyze_situation")
        return f"budget {self._case.budget}, rate {self._case.rate} %, chance {LEAST_CHANCE} %"

    def identify_options(self) -> str:
        """Return the cost of each option, and its cash flow of every year if all goes well."""
        self._looks.append("identify_options")
        lines = []
        for name, cost in self._case.costs.items():
            lines.append(f"{name}: cost {cost}, flows {' '.join(map(str, self._case.flows[name]))}")
        return "\n".join(lines)

    def evaluate_risks(self, option: str) -> str:
        """Return the chance that an option pays its cash flows. Otherwise it pays nothing.

        Args:
            option: its name
        """
        self._check_name(option)
        self._looks.append(option)
        return f"{option}: chance {self._case.chances[option]} %"

    def make_decision(self, option: str) -> str:
        """Choose the option of the highest value: chance x discounted cash flows - cost.

        It must be within the budget, and its chance high enough. This ends the episode.

        Args:
            option: its name
        """
        if self.done:
            return "error: the episode is over"
        self._check_name(option)
        self.done = True
        self._decision = option
        return "right" if self._check() else "wrong"

    def _check_name(self, name: str):
        if name not in self._case.costs:
            raise ValueError(f"no option {name!r:.40}; options: {', '.join(self._case.costs)}")

    # ------------------------------------------------------------------------------ the rewards
    @property
    def _reward_parts(self) -> dict:
        case, name = self._case, self._decision
        feasibility = risk = gain = 0.0
        if name:
            feasibility = FEASIBILITY * case.is_feasible(name)
            risk = RISK * case.is_safe(name)
            share = case.value(name) / case.value(case.ranked()[0])
            gain = RETURN * min(max(share, 0.0), 1.0) * case.is_feasible(name)
        return {"feasibility": feasibility, "risk": risk, "return": gain,
                "fees": -FEE * len(self._looks)}

    def get_reward(self) -> float:
        return sum(self._reward_parts.values())

    reward = property(get_reward)

    def _check(self) -> bool:
        """Return whether the best option was chosen."""
        return self._decision == self._case.ranked()[0]

    def _reply(self, text: str) -> str:
        return "Use the tools."

    def _expert(self) -> list[dict]:
        """Return the next call: look at the most promising options, then choose the best of them.

        An option is promising if with a chance of 100 % it would be worth more than the best yet.
        """
        if self.done:
            return []
        case = self._case
        for tool in ("analyze_situation", "identify_options"):
            if tool not in self._looks:
                return [{"name": tool, "arguments": {}}]
        best = next((name for name in case.ranked() if name in self._looks), None)
        promises = {}
        for name in case.costs:
            if case.is_feasible(name) and name not in self._looks:
                promises[name] = case.value(name, chance=100)
        first = max(promises, key=promises.get, default=None)
        if first and (best is None or promises[first] > case.value(best)):
            return [{"name": "evaluate_risks", "arguments": {"option": first}}]
        if self._rng.random() < self._noise:
            best = self._rng.choice([name for name in case.costs if name != best])
        return [{"name": "make_decision", "arguments": {"option": best}}]

    # ------------------------------------------------------------------------------- the tasks
    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        """Return n distinct cases, at most 80,000. A tenth of all, by hash, is the test split."""
        rng = random.Random(f"{split} {seed}")
        tasks = {}
        while len(tasks) < min(n or 10_000, 80_000):
            case = rng.randrange(100_000, 1_000_000)
            if split_of(str(case)) == split:
                tasks[case] = {"case": case, "level": cls.options["level"]}
        return list(tasks.values())
