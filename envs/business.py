"""Investment decisions: which option is worth most, once what the brief hides has been asked for.

Every option has a cost today, one cash flow for each year, and a chance that the flows come at all;
else there are none. Its value is the risk-adjusted net present value, an expected value (rNPV;
Stewart, Allison and Johnson 2001, doi:10.1038/96823):

    value = chance x sum_t flow_t / (1 + rate)^t - cost

The best option has the highest value of those that cost at most the budget and whose chance is at
least the one demanded. Budget, rate, options and chances are behind tools, and each look has a fee.
The reward has four parts:

    feasibility   0.25 if the chosen option costs at most the budget
    risk          0.25 if its chance is at least the one demanded
    return        0.5 x its value / the best option's, from 0 to 1; 0 if it is not feasible
    fees          -0.01 for each look

    level 1    4 options, 1 year, rate 0 %, the same cost for all that are feasible
    level 2    4 options, 3 years        level 3    6 options, 5 years (the environment business_hard)

A case is drawn from its number.
"""
import random
import zlib
from dataclasses import dataclass
from functools import lru_cache

FEE = 0.01
FEASIBILITY, RISK, RETURN = 0.25, 0.25, 0.5
SIZES = {1: (4, 1), 2: (4, 3), 3: (6, 5)}  # level -> options, years
NAMES = ("one", "two", "three", "four", "five", "six")
# The second best option is worth at most this share of the best, so that rounding decides nothing.
MAX_SECOND = 0.9


@dataclass(frozen=True)
class Option:
    """An investment: its cost, its flow in every year, and the chance in percent that they come."""

    cost: int
    flows: tuple[int, ...]
    chance: int

    def value(self, rate: int, chance: int | None = None) -> float:
        """Return the value at a rate in percent, with its own chance or another one."""
        flows = sum(flow / (1 + rate / 100) ** year for year, flow in enumerate(self.flows, 1))
        return (chance or self.chance) / 100 * flows - self.cost


@dataclass(frozen=True)
class Case:
    """A decision: options by name, the budget, the rate and the least chance, both in percent."""

    options: dict[str, Option]
    budget: int
    rate: int
    least_chance: int

    def is_feasible(self, name: str) -> bool:
        return self.options[name].cost <= self.budget

    def is_safe(self, name: str) -> bool:
        return self.options[name].chance >= self.least_chance

    def value(self, name: str) -> float:
        return self.options[name].value(self.rate)

    def ranked(self) -> list[str]:
        """Return the options that may be chosen, the best first."""
        allowed = [name for name in self.options if self.is_feasible(name) and self.is_safe(name)]
        return sorted(allowed, key=self.value, reverse=True)


@lru_cache(1024)
def draw_case(number: int, level: int) -> Case:
    """Return the case of a number: two or more options may be chosen, and the best one is clear."""
    rng = random.Random(f"{number} {level}")
    while True:
        budget, rate, least_chance = rng.randrange(30, 70, 10), rng.randrange(4, 13), 70
        if level == 1:
            rate = 0
        options = {}
        for name in NAMES[:SIZES[level][0]]:
            options[name] = draw_option(level, budget, rng)
        case = Case(options, budget, rate, least_chance)
        best, second, *_ = [*case.ranked(), None, None]
        if second and 0 < case.value(best) and case.value(second) < MAX_SECOND * case.value(best):
            return case


def draw_option(level: int, budget: int, rng) -> Option:
    """Return a random option. A third of them is too expensive, and a third not safe."""
    is_feasible, is_safe = rng.random() < 2 / 3, rng.random() < 2 / 3
    if level == 1:
        cost = budget if is_feasible else budget + 20
        return Option(cost, (rng.randint(cost + 10, 99),), 100 if is_safe else 50)
    cost = rng.randint(budget // 2, budget) if is_feasible else budget + rng.randint(1, 20)
    chance = rng.randrange(70, 100, 5) if is_safe else rng.randrange(40, 70, 5)
    years = SIZES[level][1]
    mean = cost / years * rng.uniform(1.2, 2.5)
    return Option(cost, tuple(round(mean * rng.uniform(0.5, 1.5)) for _ in range(years)), chance)


class Business:
    """Choose the option of the highest risk-adjusted net present value."""

    system_prompt = ("Choose the option of the highest value: chance x discounted flows - cost. "
                     "Cost must be in the budget, chance high enough.")
    max_turns = 10
    limits = {"max_new_tokens": 64, "max_tokens": 1024}
    levels = (1,)

    def reset(self, case: int, level: int = 1, noise: float = 0.0, noise_seed: int = 0, **_) -> str:
        """Begin with the number of a case.

        With probability `noise` the scripted expert decides for another option than the best.
        `noise_seed` decides when.
        """
        self._case = draw_case(case, level)
        self._looks = 0
        self._situation_known = False
        self._options_known = False
        self._chances = {}  # those that evaluate_risks has told
        self._decision = None
        self.done = False
        self.reward = 0.0
        self._noise = noise
        self._rng = random.Random(f"{noise_seed} {case}")
        options, years = SIZES[level]
        return f"Case {case}: {options} options, years: {years}. Which one?"

    # ------------------------------------------------------------------------------- the tools
    def analyze_situation(self) -> str:
        """Return the budget, the interest rate and the least chance that an option must have."""
        self._pay()
        self._situation_known = True
        case = self._case
        return f"budget {case.budget}, rate {case.rate} %, chance {case.least_chance} %"

    def identify_options(self) -> str:
        """Return the options: the cost of each, and its cash flow of every year."""
        self._pay()
        self._options_known = True
        lines = [f"{name}: cost {option.cost}, flows {' '.join(map(str, option.flows))}"
                 for name, option in self._case.options.items()]
        return "\n".join(lines)

    def evaluate_risks(self, option: str) -> str:
        """Return the chance that the cash flows of an option come.

        Args:
            option: the name of the option
        """
        self._pay()
        self._chances[option] = self._find(option).chance
        return f"{option}: chance {self._chances[option]} %"

    def make_decision(self, option: str) -> str:
        """Decide for an option. This ends the episode.

        Args:
            option: the name of the option
        """
        if self.done:
            return "error: the episode is over"
        self._find(option)
        self.done = True
        self._decision = option
        self.reward = sum(self._reward_parts.values())
        return "right" if self._check() else "wrong"

    # ------------------------------------------------------------------------------ the rewards
    def _pay(self):
        self._looks += 1
        self.reward = -FEE * self._looks

    def _find(self, name: str) -> Option:
        if name not in self._case.options:
            raise ValueError(f"no option {name!r:.40}; options: {', '.join(self._case.options)}")
        return self._case.options[name]

    @property
    def _reward_parts(self) -> dict:
        parts = {"feasibility": 0.0, "risk": 0.0, "return": 0.0, "fees": -FEE * self._looks}
        if self._decision:
            feasible = self._case.is_feasible(self._decision)
            share = self._case.value(self._decision) / self._case.value(self._case.ranked()[0])
            parts["feasibility"] = FEASIBILITY * feasible
            parts["risk"] = RISK * self._case.is_safe(self._decision)
            parts["return"] = RETURN * min(max(share, 0.0), 1.0) * feasible
        return parts

    def get_reward(self) -> float:
        return sum(self._reward_parts.values())

    def _check(self) -> bool:
        """Return whether the best option was chosen."""
        return self._decision == self._case.ranked()[0]

    def _expert(self) -> list[dict]:
        """Return the next call: look at the risks of the most promising options, then decide.

        An option whose value would be lower even with a chance of 100 % is not looked at.
        """
        if self.done:
            return []
        if not self._situation_known:
            return [{"name": "analyze_situation", "arguments": {}}]
        if not self._options_known:
            return [{"name": "identify_options", "arguments": {}}]
        case = self._case
        feasible = [name for name in case.options if case.is_feasible(name)]
        safe = [name for name in feasible if name in self._chances and case.is_safe(name)]
        best = max(safe, key=case.value, default=None)
        promise = {name: case.options[name].value(case.rate, chance=100) for name in feasible}
        for name in sorted(promise, key=promise.get, reverse=True):
            if name not in self._chances and (best is None or promise[name] > case.value(best)):
                return [{"name": "evaluate_risks", "arguments": {"option": name}}]
        if self._rng.random() < self._noise:
            best = self._rng.choice([name for name in case.options if name != best])
        return [{"name": "make_decision", "arguments": {"option": best}}]

    # ------------------------------------------------------------------------------- the tasks
    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        """Return n cases. A tenth of all, by hash, is the test split."""
        rng = random.Random(f"{split} {seed}")
        tasks = {}
        while len(tasks) < (10_000 if n is None else n):
            case = rng.randrange(100_000, 1_000_000)
            if (zlib.crc32(str(case).encode()) % 10 == 0) == (split == "test"):
                tasks[case] = {"case": case, "level": rng.choice(cls.levels)}
        return list(tasks.values())


class BusinessHard(Business):
    """Choose among options with cash flows over several years."""

    levels = (2, 3)
    max_turns = 12
    limits = {"max_new_tokens": 512, "max_tokens": 4096}
