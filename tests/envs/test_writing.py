"""envs/writing.py: every part of the reward by hand, what is a sentence, and texts that try to be paid for nothing."""
import hashlib
import json

import pytest

import envs
from envs.tasks import load_tasks
from envs.writing import Writing, is_sentence, tense_share, words_of
from tests.agents import at_random, expert, play, repeating, silent

LEVELS = {level: envs.with_options(Writing, {"level": level}) for level in (1, 2, 3)}
BRIEF = {"words": ["lantern", "basket"], "min_words": 20, "max_words": 40, "person": "first", "tense": "past"}
GOOD = ("Before dawn I carried the lantern across the wide square. Even so, we found a basket under the bridge. "
        "Then my brother slept near the quiet harbour.")


def scored(text, **demands):
    env = Writing()
    env.reset(**BRIEF | demands)
    env.write_paragraph(text)
    return env


def parts(text, **demands):
    return scored(text, **demands)._score()[1]


# ------------------------------------------------------------------------------------------------------------- by hand
def test_a_text_that_meets_the_brief():
    env = scored(GOOD)
    assert len(words_of(GOOD)) == 27
    assert env._score() == (1.0, {"words": 1.0, "person": 1.0, "tense": 1.0, "trigrams": 1.0})
    assert env._reward_parts == dict.fromkeys(["words", "person", "tense", "trigrams"], 0.25) and env.get_reward() == 1 and env._check()


def test_words():
    assert parts(GOOD, words=["lantern", "mirror"])["words"] == 0.5
    assert parts(GOOD, words=["lanterns"])["words"] == 0.0  # a word is a whole word
    assert parts(GOOD, words=["Lantern", "wide square", "caf\u00e9"])["words"] == 0.75  # those of a file, as people write them
    assert parts("A caf\u00e9.", words=["caf\u00e9"])["words"] == 1.0


@pytest.mark.parametrize("least, most, factor", [(27, 27, 1.0), (54, 60, 0.5), (1, 9, 1 / 3), (20, 40, 1.0)])
def test_length(least, most, factor):
    assert scored(GOOD, min_words=least, max_words=most)._score()[0] == pytest.approx(factor)


def test_person():
    assert parts(GOOD, person="third")["person"] == 0.0
    assert parts("I saw her and my sister saw him.")["person"] == 0.5  # I, my; her, him
    assert parts("The rain fell on the roof.")["person"] == 0.0


@pytest.mark.parametrize("text, tense, share", [
    ("I walked and she ran", "past", 1.0), ("I walked and she runs", "past", 0.5), ("I walk", "past", 0.0), ("I walk", "present", 1.0),
    ("I need it", "present", 1.0), ("She didn't find it, for I'd lost it", "past", 1.0), ("you couldn\u2019t see", "past", 1.0), ("I can't see", "present", 1.0),
    ("I put it here", "present", 1.0), ("she put it here", "past", 1.0), ("she never saw it", "past", 1.0), ("he became old, and we shook", "past", 1.0),
    ("we slowly carried it", "past", 1.0), ("she gave you the key", "past", 1.0), ("they and I sang", "past", 1.0), ("the rain fell", "past", 0.0)])
def test_tense(text, tense, share):
    assert tense_share(words_of(text), tense, 1) == share


def test_fewer_verbs_than_one_in_two_sentences_count_as_wrong():
    assert tense_share("i walked".split(), "past", 4) == 0.5


def test_trigrams():
    assert parts("one two three one two three")["trigrams"] == 0.75  # 3 of 4 differ


def test_acrostic():
    assert parts(GOOD, acrostic="BET")["acrostic"] == 1.0
    assert parts(GOOD, acrostic="BAT")["acrostic"] == pytest.approx(2 / 3)
    assert parts(GOOD, acrostic="BETA")["acrostic"] == 0.75
    assert parts(GOOD, acrostic="BE")["acrostic"] == pytest.approx(2 / 3)  # a sentence too many


def test_rhyme():
    text = "I saw the lantern in the night. I found the basket by the light. "
    assert parts(text, rhyme="ight")["rhyme"] == 1.0
    assert parts(text + "Then I slept in the rain.", rhyme="ight")["rhyme"] == pytest.approx(2 / 3)
    assert parts(text + "Then I slept through the night.", rhyme="ight")["rhyme"] == pytest.approx(2 / 3)  # the same word


@pytest.mark.parametrize("text, is_one", [
    ("Before dawn I carried the lantern home.", True), ("The old ship came into the harbour at last!", True),
    ("before dawn I carried the lantern home.", False), ("Before dawn I carried the lantern home", False),
    ("I ran home.", False), ("Lantern basket window mirror garden letter.", False), ("I was in it and you were on it.", False),
    ("Before dawn I carried the the lantern home.", False), ("Before dawn I carried the of lantern.", False),
    ("Before dawn I carried a lantern to.", False), ("I carried " + "the old lantern and " * 8 + "slept.", False), ("", False), (".", False)])
def test_what_is_a_sentence(text, is_one):
    assert is_sentence(text) == is_one


def test_paragraphs_add_up_and_are_edited():
    env = scored("I carried the lantern across the wide square.")
    env.write_paragraph("Then she finds a basket under the bridge.")
    assert env._score()[1]["tense"] == 0.5
    review = env.edit_content("she finds", "we found")
    assert review == "16 words; form 0.80, words 1.00, person 1.00, tense 1.00, trigrams 1.00"
    assert env._reply("It is finished.") is None
    for old in ("she finds", ""):
        with pytest.raises(ValueError, match="no such passage"):
            env.edit_content(old, "x")


def test_the_tools_that_help():
    env = Writing()
    assert env.reset(**BRIEF, acrostic="BET", rhyme="ight") == (
        "Write 20 to 40 words in the first person and the past tense. Use lantern, basket. Repeat no three words in a row. "
        "The first letters of the sentences spell BET. Every sentence ends in another word in -ight.")
    assert env.brainstorm_ideas("ight") == "night, light, sight, flight, height, fight" and env.brainstorm_ideas("zz") == "none"
    assert env.create_outline(3) == "1. B lantern\n2. E basket\n3. T "
    assert env.get_reward() == 0 and not env._check() and env._reply("Done.") == "Write with write_paragraph."


# ------------------------------------------------------------------------------------------- paid for nothing, or nearly
@pytest.mark.parametrize("text, most", [
    ("lantern basket", 0.0),
    ("Lantern. Basket. Lantern. Basket. I. Was.", 0.0),
    ("Lantern basket lantern basket lantern basket.", 0.0),
    ("I was by the lantern of the basket.", 0.4),  # one sentence
    ("I was by the lantern of the basket. " * 3, 0.85),  # the same one again: trigrams
    ("The the of I was lantern and and my basket a of in I we. " * 2, 0.0),  # a salad
    ("I I I we we we my my my was was was had had lantern basket the the.", 0.0)])
def test_texts_that_try_to_be_paid_for_nothing(text, most):
    env = scored(text)
    assert env.get_reward() <= most and not env._check()


def pasting(tool, arguments):
    """Return an agent that writes the result of a tool three times."""
    def agent(env, seen):
        if len(seen) == 1:
            return [{"name": tool, "arguments": arguments}]
        return [{"name": "write_paragraph", "arguments": {"text": seen[-1]}}] if len(seen) < 5 else "Done."
    return agent


def writing_the_brief(env, seen):
    return [{"name": "write_paragraph", "arguments": {"text": seen[0]}}] if len(seen) < 3 else "Done."


@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_solves_every_task_and_others_earn_less(level):
    tasks = LEVELS[level]._tasks("test", 60, seed=0)
    assert play(LEVELS[level], expert, tasks)[1] == 1.0
    pasted = [pasting("create_outline", {"sentences": 6}), pasting("brainstorm_ideas", {"letters": "b"})]
    for agent in (silent, repeating, at_random, writing_the_brief, *pasted):
        reward, solved = play(LEVELS[level], agent, tasks)
        assert reward < 0.35 and solved == 0, agent


def test_a_noisy_expert_leaves_words_out():
    tasks = [{**task, "noise": 0.5, "noise_seed": i} for i, task in enumerate(Writing._tasks("train", 100, seed=0))]
    reward, solved = play(Writing, expert, tasks)
    assert 0.8 < reward < 0.95 and solved < 0.2


def test_tasks_are_a_function_of_their_arguments_and_share_no_choice_of_words():
    train, test = Writing._tasks("train", 500, seed=0), Writing._tasks("test", 500, seed=0)
    assert train == Writing._tasks("train", 500, seed=0) != Writing._tasks("train", 500, seed=1)
    assert not {tuple(task["words"]) for task in train} & {tuple(task["words"]) for task in test}


@pytest.mark.parametrize("level, tasks_hash, episodes_hash", [(1, "c778b35af741ad92", "0e800ae000e8363f"), (2, "d21a2129d0622d19", "6c9a72b93ba2b522"), (3, "0ad32bac0f3149bf", "855bacb53f5602d0")])
def test_tasks_and_episodes_are_the_same_to_the_byte(level, tasks_hash, episodes_hash):
    """Their words are read from envs/writing.json: a run that was made before finds its tasks again."""
    tasks = load_tasks("writing", "train", 40, 3, env_options={"level": level})
    assert hashlib.sha256(json.dumps(tasks).encode()).hexdigest()[:16] == tasks_hash
    shown = []
    for task in tasks[:10]:
        env = envs.with_options(envs.load("writing"), {"level": level})()
        shown.append(env.reset(**{key: value for key, value in task.items() if key != "env"}))
        while isinstance(calls := env._expert(), list) and calls:
            shown += [str(call) + str(getattr(env, call["name"])(**call["arguments"])) for call in calls]
            if getattr(env, "done", False):
                break
        shown.append(env.get_reward())
    assert hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16] == episodes_hash
