"""extras/adapters/reasoning_gym_text.py, extras/adapters/gymnasium_text.py, extras/adapters/verifiers_text.py: environments of other packages. They are skipped where the package is missing."""
import faulthandler
import json
import random
import re
import sys
import warnings

import pytest

import envs
from extras import check
from extras.check import Conformance
from extras.play import Config, Game, Setup
from schooling import demonstrate
from envs.files import ADAPTERS
from envs.tasks import load_tasks
from core.config import EnvironmentFault, UserError
from core.tiny import make_tiny


def setup(env, env_options=None):
    return Setup(Config(env=env, env_options=env_options))


@pytest.fixture(autouse=True)
def no_timer():
    """A watch that is not closed leaves the timer of hung calls behind."""
    yield
    faulthandler.cancel_dump_traceback_later()


def told(env, env_options=None):
    this = setup(env, env_options)
    return {name: (verdict, reason) for name, verdict, reason in Conformance(this).verdicts()}


@pytest.mark.parametrize("package", ADAPTERS)
def test_without_the_package_one_line_says_how_to_install_it(package, monkeypatch):
    monkeypatch.delitem(sys.modules, f"extras.adapters.{package}_text", raising=False)
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"^environment '{package}:any': .*; pip install -U {package}$"):
        envs.load(f"{package}:any")


def test_a_game_of_a_module_is_registered_by_importing_it(tmp_path, monkeypatch):
    """As gymnasium.make("my_games:Maze-v0") does."""
    pytest.importorskip("gymnasium")
    (tmp_path / "my_games.py").write_text("import gymnasium\nfrom gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv\n\nclass Maze(FrozenLakeEnv):\n    'A maze.'\n\ngymnasium.register('Maze-v0', Maze)\n")
    monkeypatch.syspath_prepend(tmp_path)
    [task] = load_tasks("gymnasium:my_games:Maze-v0", "train", 1, 0)
    cls = envs.load(task["env"])
    assert cls.system_prompt == "A maze." and "observation: 0" in cls().reset(task["number"]) and sys.modules["my_games"].Maze
    with pytest.raises(UserError, match="^gymnasium:my_games:Mase-v0: .*Did you mean: `Maze`"):
        envs.load("gymnasium:my_games:Mase-v0")
    with pytest.raises(UserError, match="^gymnasium:nowhere:Maze-v0: .*No module named 'nowhere'"):
        envs.load("gymnasium:nowhere:Maze-v0")


# ---------------------------------------------------------------------------------------------------------- reasoning-gym
@pytest.fixture
def families(monkeypatch):
    monkeypatch.setattr(check, "EPISODES", 30)
    monkeypatch.setattr(check, "TRAINING", 300)
    return pytest.importorskip("reasoning_gym.factory").DATASETS


@pytest.mark.parametrize("family", [
    "chain_sum", "prime_factorization", *(pytest.param(name, marks=pytest.mark.slow) for name in ("basic_arithmetic", "spell_backward", "leg_counting"))])
def test_families_of_reasoning_gym_conform(family, families):
    found = told(f"reasoning_gym:{family}")
    assert {verdict for verdict, _ in found.values()} == {"pass"}, found


def test_most_families_are_played_and_their_solutions_are_right(families):
    """All of them take minutes: a sample, and another one each day would not be a test."""
    assert len(families) > 100
    for family in random.Random(0).sample(sorted(families.keys() - {"composite", "acre", "knight_swap", "futoshiki", "zebra_puzzles"}), 25):
        this = setup(f"reasoning_gym:{family}")
        [task] = this.tasks("train", 1)
        game = Game(this, task)
        assert game.seen[0] and json.dumps(task) and game.session.task["number"] < 10_000
        try:
            turn = game.session.expert()
        except EnvironmentFault as fault:
            assert "has no solution" in str(fault) and family in ("graph_color", "rubiks_cube"), family
            continue
        game.take_turn(*turn)
        assert game.over and game.score[0] == 1 and game.score[2], family


def test_where_a_family_has_no_solution_no_expert_is_checked_or_imitated(families, capsys):
    """Its empty answers would be learned."""
    found = told("reasoning_gym:graph_color")
    assert [verdict for verdict, _ in found.values()] == ["pass"] * 6 + ["-"] * 6, found
    tasks = setup("reasoning_gym:graph_color").tasks("train", 9)
    assert demonstrate(make_tiny()[1], "reasoning_gym:graph_color", tasks) == [] and "has no solution of this question" in capsys.readouterr().out


def test_questions_are_split_by_their_hash_whatever_the_seed(families):
    """Two-digit sums are few: the same question comes up again and again, always on one side."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 3000}
    cls = envs.with_options(envs.load("reasoning_gym:chain_sum"), options)

    def questions(split, seed):
        return [cls().reset(**task) for task in cls._tasks(split, None, seed)]
    train, test = questions("train", 0), questions("test", 1)
    assert len(set(train)) == len(train) > 100 and len(set(test)) == len(test) > 5 and not set(train) & set(test)
    assert sorted(train) == sorted(questions("train", 7)) and train != questions("train", 7) and set(cls._entries()[i]["question"] for i in range(3000)) == {*train, *test}


def test_difficulty_by_options_and_several_families(families):
    names = "reasoning_gym:chain_sum,reasoning_gym:leg_counting"
    tasks = load_tasks(names, "train", 6, 0)
    assert [task["env"] for task in tasks[:2]] == names.split(",") and load_tasks(names, "train", 6, 0) == tasks
    terms = [Game(this, task).seen[0].count("+") + Game(this, task).seen[0].count(" - ") for this in [setup("reasoning_gym:chain_sum", "min_terms=5,max_terms=5")] for task in this.tasks("train", 5)]
    assert terms == [4] * 5
    for env, options, says in (("chain_sums", None, "did you mean chain_sum"), ("chain_sum", "min_terms=-1", "min_terms must be positive"), ("chain_sum", "terms=3", "has no such option"),
                               ("chain_sum", "min_terms=few", "cannot be read as int")):
        with pytest.raises(UserError, match=says):
            setup(f"reasoning_gym:{env}", options).tasks("train", 1)


def test_an_answer_in_text_counts_and_what_a_verifier_cannot_read_is_wrong(families):
    env = envs.load("reasoning_gym:prime_factorization")()
    for text, reward in (("<answer>%s</answer>", 1.0), ("I think <answer>1</answer>, no: <answer>%s</answer>", 1.0), ("%s", 0.0), ("<answer>banana 5</answer>", 0.0), ("", 0.0)):
        env.reset(number=4)
        assert env._reply(text.replace("%s", env._entry["answer"])) is None and env.get_reward() == reward and env._check() == bool(reward)


def test_a_part_of_the_score_is_no_success(families):
    cls = envs.load("reasoning_gym:chain_sum")
    assert (cls.options["size"], cls.options["seed"]) == (10_000, 0)
    env = cls()
    env.reset(number=4)
    env._reply(f"<answer>{env._entry['answer']} or more</answer>")
    assert 0 < env.get_reward() < 1 and not env._check()


def test_an_instance_that_is_used_again_has_solved_nothing(families):
    env = envs.load("reasoning_gym:chain_sum")()
    env.reset(number=4)
    env._reply(env._expert())
    env._reward_parts["old"] = 1.0
    assert env._check()
    env.reset(number=5)  # and no limit lets the model answer
    assert (env._check(), env.get_reward(), env._reward_parts, env.done) == (False, 0.0, {}, False)


def test_reasoning_gym_in_a_rollout_and_the_experts_demonstrations(families):
    import agent
    from schooling import demonstrate
    from core.tiny import make_tiny
    model, tokenizer = make_tiny()
    tasks = load_tasks("reasoning_gym:chain_sum", "train", 2, 0)
    assert [t.reward for t in demonstrate(tokenizer, "reasoning_gym:chain_sum", tasks, agent.Limits(max_tokens=4096))] == [1.0, 1.0]
    episodes = agent.rollout(model.eval(), tokenizer, "reasoning_gym:chain_sum", tasks, 2, limits=agent.Limits(max_new_tokens=8, max_tokens=4096))
    assert len(episodes) == 4 and all(t.messages[1]["content"].startswith("State the final answer") for t in episodes)


# -------------------------------------------------------------------------------------------------------------- gymnasium
@pytest.fixture
def games(monkeypatch):
    for name, value in (("EPISODES", 3), ("REPLAYED", 2), ("TRAINING", 20)):
        monkeypatch.setattr(check, name, value)
    return pytest.importorskip("gymnasium")


@pytest.mark.parametrize("name", ["FrozenLake-v1", "CartPole-v1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Blackjack-v1", "Taxi-v4"))])
def test_games_of_gymnasium_conform(name, games):
    if name not in games.registry:
        name = name.replace("v4", "v3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = told(f"gymnasium:{name}")
    assert "FAIL" not in {verdict for check, (verdict, _) in found.items() if "random" not in check}, found
    assert found["valid tool schemas"] == ("pass", "act") and found["the expert solves 95 % or more"][0] == "-"


def test_frozen_lake_is_played_to_the_goal(games):
    this = setup("gymnasium:FrozenLake-v1", "is_slippery=false")
    game = Game(this, this.tasks("train", 1)[0])
    assert "Move left" in game.system_prompt and "[S]FFF" in game.seen[0] and "observation: 0" in game.seen[0]
    for action in (1, 9, 1, 2, 2, 1, 2):  # 9 is no action, and changes nothing
        [(text, gain)] = game.take_turn("", [{"name": "act", "arguments": {"action": action}}])
        assert ("Discrete(4)" in text) == (action == 9) and gain == (len(game.record) == 10)
    assert game.over and "[G]" in text and game.score == (1.0, {}, True)
    env = game.session.env
    with pytest.raises(ValueError):  # TRL does not know `done`
        env.act(1)
    assert env.get_reward() == 1.0 and this.cls.limits["max_tool_calls"] == this.cls.max_turns == 100


def test_a_game_ends_after_its_number_of_steps(games):
    env = setup("gymnasium:FrozenLake-v1", "is_slippery=false").cls()
    env.reset(number=0)
    ends = [env.act(0) and env.done for _ in range(100)]  # against the wall
    assert ends == [False] * 99 + [True] and not env._check()


def test_a_game_is_solved_at_its_threshold(games):
    """A pole that falls at once has a positive reward, and Acrobot's best one is negative."""
    env = envs.load("gymnasium:CartPole-v1")()
    env.reset(number=0)
    while not env.done:
        env.act(0)
    assert 0 < env.reward < 20 and not env._check()
    env.reset(number=0)
    env.reward = 474.0 - 1e-10  # rewards such as 0.1 add up to a little less than the sum
    env.act(0)
    assert env._check()


def test_a_game_may_have_the_threshold_0_and_no_documentation_of_its_own(games):
    """What gymnasium says of all games is no prompt. Without any reward this game is solved; without a threshold it would not be."""
    class Quiet(games.Env):
        metadata = {"render_modes": []}
        action_space = observation_space = games.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return 0, {}

        def step(self, action):
            return 0, 0.0, True, False, {}

    solved = {}
    for name, threshold in (("Quiet-v0", 0.0), ("Quiet-v1", None)):
        games.register(name, entry_point=Quiet, reward_threshold=threshold)
        env = envs.load(f"gymnasium:{name}")()
        env.reset(number=0)
        env.act(0)
        solved[name] = env._check()
        assert env.system_prompt == ""
    assert solved == {"Quiet-v0": True, "Quiet-v1": False}


def test_a_registered_name_keeps_what_it_sets(games):
    """FrozenLake8x8-v1 is the constructor of FrozenLake-v1 with another map, and Blackjack-v1 plays by other rules than its constructor's defaults."""
    assert envs.load("gymnasium:FrozenLake8x8-v1")().reset(number=0).count("\n") == 9
    assert envs.load("gymnasium:Blackjack-v1").options == {"natural": False, "sab": True}
    large = envs.load("gymnasium:FrozenLake8x8-v1")
    assert large.max_turns == large.limits["max_tool_calls"] == 200 and "Starting State" not in large.system_prompt
    assert setup("gymnasium:FrozenLake8x8-v1", "map_name=4x4").cls().reset(number=0).count("\n") == 5


def test_seeds_are_disjoint_and_decide_all(games):
    cls = envs.load("gymnasium:Blackjack-v1")
    train, test = cls._tasks("train", None, 0), cls._tasks("test", None, 0)
    assert sorted(task["number"] for task in train + test) == list(range(10_000)) and 900 < len(test) < 1100 and train[:20] == cls._tasks("train", 20, 0) != cls._tasks("train", 20, 1)
    assert len({cls().reset(**task) for task in train[:1000]}) > 50 and re.fullmatch(r"observation: \(\d+, \d+, \d\)", cls().reset(**train[0]))


def test_taxi_says_what_its_number_means(games):
    name = next(name for name in ("Taxi-v4", "Taxi-v3") if name in games.registry)
    assert re.search(r"\[[RGYB ]\].*\nobservation: \(\d, \d, \d, \d\)$", envs.load(f"gymnasium:{name}")().reset(number=0), re.S)
    # Where the passenger waits the taxi is shown in two colours.
    assert not any("\x1b" in envs.load(f"gymnasium:{name}")().reset(number=number) for number in range(100))


@pytest.mark.parametrize("name, says", [("FrozenLak-v1", "Did you mean: `FrozenLake`"), ("Pendulum-v1", "its actions are Box")])
def test_what_gymnasium_cannot_play_in_text_is_told(name, says, games):
    with pytest.raises(UserError, match=says):
        envs.load(f"gymnasium:{name}")


def test_a_game_of_your_own_without_a_text_and_with_any_options(games, monkeypatch):
    class Bare(games.Env):
        action_space, observation_space, metadata = games.spaces.Discrete(2), games.spaces.Discrete(2), {"render_modes": []}

        def __init__(self, size=3, **options):
            self.options = options

        def reset(self, seed=None, options=None):
            return 0, {}

        def step(self, action):
            return 0, float(action), True, False, {}
    games.register("Bare-v0", entry_point=lambda **options: Bare(**options))
    try:
        cls = envs.load("gymnasium:Bare-v0")
        assert cls.options == {"size": 3} and cls.system_prompt == "" and isinstance(cls().reset(number=0), str)
    finally:
        del games.registry["Bare-v0"]


# -------------------------------------------------------------------------------------------------------------- verifiers
TASKSET = '''
import verifiers.v1 as vf

__all__ = ["Doubles"]


class Data(vf.TaskData):
    answer: int


class Task(vf.Task[Data]):
    {setup}

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace{runtime}) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward
    async def short(self, trace) -> float:
        return float(trace.num_turns == 1 and len(trace.messages[-1].content) < 5)


class Config(vf.TasksetConfig):
    factor: int = 2


class Doubles(vf.Taskset[Task, Config]):
    INFINITE = True

    def load(self):
        n = 0
        while True:
            n += 1
            yield Task(Data(prompt={prompt}, system_prompt="A number.", answer=self.config.factor * (n % 300)), self.config.task)
'''


@pytest.fixture
def taskset(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1")
    monkeypatch.setattr(check, "EPISODES", 10)
    monkeypatch.setattr(check, "TRAINING", 50)
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, setup="pass", runtime="", prompt='f"{self.config.factor} times {n % 300}?"'):
        (tmp_path / f"{name}.py").write_text(TASKSET.format(setup=setup, runtime=runtime, prompt=prompt))
        return f"verifiers:{name}"
    return write


def test_a_taskset_of_verifiers_is_played_with_its_own_rewards(taskset):
    env = taskset("doubles_of_ours")
    found = told(env)
    assert "FAIL" not in {verdict for verdict, _ in found.values()} and found["train and test tasks are disjoint"][0] == "pass", found
    for options, answer, score in ((None, 2, (3.0, {"right": 2.0, "short": 1.0}, True)), ("factor=5", 5, (3.0, {"right": 2.0, "short": 1.0}, True)), (None, 123456, (0.0, {"right": 0.0, "short": 0.0}, False)),
                                   (None, "<think>\n3?\n</think>\n\n2", (3.0, {"right": 2.0, "short": 1.0}, True)), (None, "<think>\n2", (1.0, {"right": 0.0, "short": 1.0}, False))):
        this = setup(env, options)
        game = Game(this, {"number": 0})
        assert game.system_prompt == "A number." and game.seen == [f"{this.cls.options['factor']} times 1?"]
        assert game.take_turn(str(answer), []) == [(None, score[0])] and game.over and game.score == score
    questions = [{Game(this, task).seen[0] for task in this.tasks(split, 10_000)} for split in ("train", "test")]
    assert not questions[0] & questions[1] and len(questions[0]) + len(questions[1]) == 300


@pytest.mark.parametrize("n, changes", enumerate([{"setup": "async def setup(self, runtime): pass"}, {"runtime": ", runtime: vf.Runtime"},
                                                  {"setup": "async def finalize(self, trace, runtime): pass"},
                                                  {"prompt": '[vf.UserMessage(content="1"), vf.AssistantMessage(content="2"), vf.UserMessage(content=str(n))]'}]))
def test_what_needs_more_than_a_text_is_refused(n, changes, taskset):
    with pytest.raises(UserError, match="needs tools, a runtime or turns"):
        setup(taskset(f"needs_more_{n}", **changes)).tasks("train", 1)


@pytest.mark.parametrize("name, says", [("no_such_taskset", "not found"), ("json", "exports no Taskset")])
def test_names_that_are_no_taskset(name, says, taskset):
    with pytest.raises(UserError, match=f"verifiers:{name}: .*{says}"):
        envs.load(f"verifiers:{name}")
