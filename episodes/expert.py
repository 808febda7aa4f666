"""Demonstrations: episodes of the environments' scripted experts, as if a model had played them."""
from tqdm import tqdm

import envs
from agent import Episode, Trajectory
from envs import Limits
from envs.session import Session, Watch, load_environments
from experiment.episodes import without_faults, without_too_long
from experiment.errors import EnvironmentFault


def demonstrate(tokenizer, env_name: str, tasks: list[dict],
                limits: Limits = Limits()) -> list[Trajectory]:
    """Play the scripted experts. The episodes take the path of rollouts: the ids are the same."""
    envs.need_expert(env_name)
    classes, chats = load_environments(tokenizer, env_name)
    warn_of_letters(tokenizer, classes)
    trajectories = []
    watch = Watch(limits.tool_timeout)
    for i, task in enumerate(tqdm(tasks, "demonstrations", leave=False)):
        name = task.get("env", env_name)
        session = Session(watch, name, classes[name], task)
        episode = Episode(session, chats[name], limits, str(i))
        while episode.can_take_turn:
            expert_turn(episode)
        trajectories.append(episode.trajectory)
        watch.check_abandoned()
    watch.check()
    return without_faults(without_too_long(trajectories, limits.max_tokens))


def expert_turn(episode: Episode):
    """Let the expert take a turn of the episode in the model's place."""
    try:
        text, calls = episode.session.expert()
    except EnvironmentFault as fault:
        return episode.fail(str(fault))
    ids = episode.chat.turn(text, calls)
    episode.take_turn(ids, [0.0] * len(ids))
    if episode.calling:
        episode.take_results()


def warn_of_letters(tokenizer, classes: dict):
    """Print a note if the tokenizer spells the words of an environment's tools in letters.

    The tiny model's tokenizer knows few words besides those of the environments that come with it.
    """
    for name, cls in classes.items():
        words = []
        for schema in envs.schemas(cls):
            words += [schema["function"]["name"], *schema["function"]["parameters"]["properties"]]
        spelled = []
        for word in dict.fromkeys(words):
            if len(tokenizer.tokenize(word)) > max(len(word) / 2, 2):
                spelled.append(word)
        if spelled:
            print(f"note: this tokenizer spells {', '.join(spelled[:5])} of environment {name} in "
                  "letters, which makes its turns long and hard to learn; a real model does not, "
                  "or add the words to TINY_TEXT in llm/tiny.py")
