"""envs/search.py and envs/corpus.py: BM25 and SQuAD's scores by hand, archives, one's own documents, and agents that must earn less than the expert."""
import hashlib
import json
import math
import re

import pytest

import envs
import grpo
from envs.corpus import Corpus, read_corpus
from envs.search import FORMS, Search, draw_facts, f1, normalized, read_archive
from envs.tasks import load_tasks
from extras.exact.checkpoint import fingerprints
from extras.exact.checkpoint import ingredients as ingredients_of
from core.config import UserError
from extras.exact.resuming import check_ingredients
from layers import Run
from tests.agents import at_random, expert, play, repeating, silent

LEVELS = {level: envs.with_options(Search, {"level": level}) for level in (1, 2, 3)}
TASK = {"question": "Archive abcd: what is the day of the founder of 10?", "answer": "12 March 1987", "archive": "abcd"}


def answered(text, right="12 March 1987"):
    env = Search()
    env.reset(**TASK | {"answer": right})
    env.answer(text)
    return env._reward_parts


# ------------------------------------------------------------------------------------------------------------- scores
@pytest.mark.parametrize("text, words", [
    ("The  Eiffel Tower.", ["eiffel", "tower"]), ("a an the", []), ("An apple, the 'theatre'", ["apple", "theatre"]),
    ("U.S.A.", ["usa"]), ("12 March 1987", ["12", "march", "1987"]), ("", []), ("half-way", ["halfway"]),
    ("-7", ["-7"]), ("(-$1,000.50)", ["-1000.50"]), ("3/4, or .75.", ["3/4", "or", ".75"]), ("5-7", ["57"]), ("$15!", ["15"])])
def test_normalisation_is_that_of_squad_but_for_numbers(text, words):
    assert normalized(text) == words


@pytest.mark.parametrize("text, right, score", [
    ("12 March 1987", "12 March 1987", 1.0),
    ("March 1987", "12 March 1987", 0.8),  # precision 1, recall 2/3
    ("on 12 March 1987", "12 March 1987", 6 / 7),  # precision 3/4, recall 1
    ("9 May 1987", "12 March 1987", 1 / 3),
    ("1987 1987 1987", "12 March 1987", 1 / 3),  # a word counts as often as the right answer has it
    ("one two", "three", 0.0),
    ("x y z w Olm", "Olm", 2 / 6),  # five words for one: the longest answer that may earn something
    ("v x y z w Olm", "Olm", 0.0),
    ("", "Olm", 0.0)])
def test_f1_by_hand(text, right, score):
    assert f1(normalized(text), normalized(right)) == pytest.approx(score)


def test_the_parts_by_hand():
    assert answered("the 12 march, 1987!") == {"exact": 0.5, "f1": 0.5}
    assert answered("March 1987") == {"exact": 0.0, "f1": pytest.approx(0.4)}
    assert answered("Olm") == {"exact": 0.0, "f1": 0.0}
    assert answered("1952", right=1952) == {"exact": 0.5, "f1": 0.5}


def test_the_first_answer_is_final_and_ends_the_episode():
    env = Search()
    env.reset(**TASK)
    assert env.answer("Olm") == "wrong" and env.done
    assert env.answer("12 March 1987").startswith("error")
    assert env.get_reward() == 0 and not env._check()


def test_one_of_several_right_answers_is_right():
    assert answered("Roma", ["Rome", "Roma"]) == {"exact": 0.5, "f1": 0.5} and answered("Oslo", ["Rome", "Roma"]) == {"exact": 0.0, "f1": 0.0}


def test_a_list_of_answers_in_a_csv_file(tmp_path):
    """It stayed one text, which no answer equals: every episode was paid nothing."""
    path = tmp_path / "questions.csv"
    path.write_text('question,answer,archive\nWhere?,"[""Rome"", ""Roma""]",abcd\nWho?,[sic],abcd\n')
    assert sorted(str(task["answer"]) for task in load_tasks("search", "train", None, 0, str(path), holds_out=False)) == ["['Rome', 'Roma']", "[sic]"]
    path.write_text('prompt,answer\nWhere?,"[""Rome"", ""Roma""]"\nWhat?,72\nWho?,\n')
    tasks = load_tasks("envs.prompts:Prompts", "train", None, 0, str(path), holds_out=False)  # --rewards exact reads it
    assert sorted(str(task["answer"]) for task in tasks) == ["", "72", "['Rome', 'Roma']"]


def test_an_answer_as_pandas_and_parquet_write_it():
    """1952.0 was not 1952, a null among the answers was the word None, and an empty one paid for silence."""
    assert answered("1952", 1952.0)["exact"] == answered("1952", [None, 1952.0])["exact"] == 0.5
    assert answered("None", ["Rome", None])["exact"] == answered("", "")["exact"] == answered("", ["Rome", ""])["exact"] == 0.0



# ---------------------------------------------------------------------------------------------------------- the corpus
def test_bm25_by_hand():
    corpus = Corpus({"a": "red red fish", "b": "red bird", "c": "blue bird sings"})
    # Words, the title three times: 6, 5, 6. "red" is in 2 of 3 documents.
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    scores = {title: idf * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * length / (17 / 3))) for title, count, length in (("a", 2, 6), ("b", 1, 5))}
    assert scores["a"] > scores["b"]
    assert corpus.best("Red?", 3) == ["a", "b"] and corpus.best("red", 1) == ["a"]
    assert corpus.best("bird blue", 3) == ["c", "b"]
    assert corpus.best("c", 3) == ["c"]  # by its title
    assert corpus.best("", 3) == corpus.best("nothing", 3) == []
    assert Corpus({"a": "red", "b": "red fish and bird"}).best("red", 2) == ["a", "b"]  # a word of all documents does not count against them


def test_documents_in_chinese_are_found_and_shown(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"title": "東京", "text": "東京是日本的首都。%s"}\n{"title": "巴黎", "text": "法国的城市"}\n' % ("长" * 200), encoding="utf-8")
    env = envs.with_options(Search, {"corpus": str(tmp_path / "c.jsonl")})()
    env.reset("日本的首都是哪里？", "東京")
    assert env.search("日本首都是").startswith("[東京] 東京是日本的首都。长")
    env.answer("京都")
    assert env._reward_parts == {"exact": 0.0, "f1": 0.25}


def test_documents_without_a_title_are_documents_of_their_own(tmp_path):
    """BEIR's corpora are written so: they were one document, named '' or 'None'."""
    (tmp_path / "c.jsonl").write_text('{"_id": "d7", "title": "", "text": "one"}\n{"title": null, "text": "two"}\n{"title": "T", "text": "three"}\n{"text": "four"}\n')
    assert read_corpus(str(tmp_path / "c.jsonl")).documents == {"d7": "one", "2": "two", "T": "three", "4": "four"}
    (tmp_path / "A.TXT").write_text("five")
    assert read_corpus(str(tmp_path)).documents == {"A.TXT": "five"}
    with pytest.raises(UserError, match=f"corpus={tmp_path}/none: no such file or folder"):
        read_corpus(f"{tmp_path}/none")


def test_a_folder_that_a_mac_has_written(tmp_path):
    """Its ._ files are no documents (they are not text: the run was refused), and a name is found however its umlaut is stored."""
    (tmp_path / "scho\u0308n.txt").write_text("one")
    (tmp_path / "._scho\u0308n.txt").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X\xff")
    corpus = read_corpus(str(tmp_path))
    assert corpus.documents == {"sch\u00f6n.txt": "one"} and corpus.best("Sch\u00f6n", 1) == ["sch\u00f6n.txt"]


def test_a_run_is_not_resumed_on_other_documents(tmp_path):
    """It went on in silence, where a changed task file is refused: a synced folder changes under a run."""
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    paths = [tmp_path / "docs" / name for name in ("a.md", "deep/a.md")]
    for path in paths:
        path.write_text("one")

    def ingredients():
        config = grpo.settle(grpo.Config(env="equations,search", env_options=f"corpus={tmp_path / 'docs'}", output_dir=str(tmp_path / "run")))
        return ingredients_of(Run(config, "grpo"))
    began = fingerprints(ingredients())
    (tmp_path / "docs" / ".DS_Store").write_text("Finder")
    check_ingredients(began, ingredients())
    for path in paths:
        path.write_text("two")
        with pytest.raises(UserError, match=f"^{path}: is not the file this run began with"):
            check_ingredients(began, ingredients())
        path.write_text("one")


def test_a_document_is_found_by_its_name_first():
    for level in LEVELS:
        for archive in ("abcd", "olmx", "quiz"):
            corpus = read_archive(archive, level)
            assert [corpus.best(title, 1) for title in corpus.documents] == [[title] for title in corpus.documents]


@pytest.mark.parametrize("level", LEVELS)
def test_the_documents_state_the_facts_and_the_answer_is_where_the_hops_lead(level):
    for task in LEVELS[level]._tasks("train", 50, seed=1):
        facts, documents = draw_facts(task["archive"], level), read_archive(task["archive"], level).documents
        assert facts.keys() == documents.keys()
        for entity, values in facts.items():
            for relation, value in values.items():
                assert any(form.format(entity, value) in documents[entity] for form in FORMS[relation])
        *relations, entity = re.fullmatch(r"Archive \w{4}: what is (.*)\?", task["question"])[1].split(" of ")
        assert len(relations) == {1: 2, 2: 2, 3: 3}[level]
        first = entity
        for relation in reversed(relations):
            entity = facts[entity][relation.removeprefix("the ")]
        assert entity == task["answer"] and entity not in documents[first]


def test_your_own_documents_from_a_folder_and_from_a_file(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "cats.txt").write_text("Cats sleep. " * 200)
    (tmp_path / "deep" / "dogs.md").write_text("Dogs bark at night.")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    (tmp_path / "rows.jsonl").write_text('{"title": "Olm", "text": "The olm lives in caves."}\n{"text": "No title."}\n{"title": "Olm", "text": "It is blind."}\n{"title": "Empty", "text": null}\n')
    question = {"question": "What barks?", "answer": "dogs"}
    env = envs.with_options(Search, {"corpus": str(tmp_path)})()
    env.reset(**question)
    assert env.search("who barks at night") == "[deep/dogs.md] Dogs bark at night."
    assert env.open_document("deep/dogs.md") == "Dogs bark at night."
    first, second = env.open_document("cats.txt (1 of 2)"), env.open_document("cats.txt (2 of 2)")
    assert first == "Cats sleep. " * 99 + "Cats sleep." and second == "Cats sleep. " * 100  # whole words
    assert max(map(len, env.search("cats sleep").splitlines())) < 130
    with pytest.raises(ValueError, match="no document 'birds'"):
        env.open_document("birds")
    env = envs.with_options(Search, {"corpus": str(tmp_path / "rows.jsonl")})()
    env.reset(**question)
    assert env.open_document("Olm") == "The olm lives in caves.\nIt is blind."  # passages of one title, as in Wikipedia's corpora
    assert env.search("olm") == "[Olm] The olm lives in caves. It is blind." and env.search("title") == "[2] No title."


@pytest.mark.parametrize("text, query", [("北京是中国的首都。", "首都"), ("富士山は日本で一番高い山です。", "富士山"), ("Die Straße in Köln", "STRASSE"), ("Cafe\u0301 Zu\u0308rich", "Zürich"), ("l'École normale", "ecole"),
                                         ("Ο ΟΔΥΣΣΕΥΣ ήταν", "Οδυσσεύς"), ("서울은 한국의 수도", "한국의"), ("my_old_notes", "old notes")])
def test_words_of_other_languages_are_found(text, query):
    """Chinese without spaces was one word a clause, and no search found anything."""
    env = Search()
    env.reset(**TASK)
    env._corpus = Corpus({"a": text * 20, "b": "something else"})
    assert env.search(query).startswith(f"[a] {text[:9]}") and len(env.search(query)) <= 104  # not "[...]", all that textwrap.shorten left


def test_a_corpus_without_documents_and_a_question_without_corpus_are_refused(tmp_path):
    with pytest.raises(UserError, match="no documents; give a folder"):
        envs.with_options(Search, {"corpus": str(tmp_path)})().reset("What?", "this")
    with pytest.raises(UserError, match="none.jsonl: no such file or folder"):
        envs.with_options(Search, {"corpus": str(tmp_path / "none.jsonl")})().reset("What?", "this")
    with pytest.raises(UserError, match="corpus=PATH"):
        Search().reset("What?", "this")


def test_a_typed_question_is_about_your_documents_or_the_archive_that_it_names(tmp_path):
    (tmp_path / "olm.txt").write_text("The olm lives in caves.")
    own = envs.with_options(Search, {"corpus": str(tmp_path)})
    for cls, question, title in ((own, "Where does the olm live?", "olm.txt"), (own, "Archive abcd: where is it?", "olm.txt"),
                                 (LEVELS[2], "Archive abcd: who is it?", next(iter(read_archive("abcd", 2).documents)))):
        env = cls()
        assert env.reset(**cls._from_text(question)) == question and env.open_document(title)
        assert env.answer("None") == "The right answer is not known." and env.done and not env._check() and env.get_reward() == 0
    with pytest.raises(UserError, match="corpus=PATH"):
        Search._from_text("Where does the olm live?")


def test_the_command_line_needs_documents_and_questions_together(tmp_path):
    (tmp_path / "olm.txt").write_text("The olm lives in caves.")
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "Where does the olm live?", "answer": "in caves"}\n')
    options = (str(path), str(path))
    (task,) = load_tasks("search", "test", None, 0, *options, {"corpus": str(tmp_path)})
    assert task["answer"] == "in caves"
    for answer in ({"value": "caves", "aliases": ["in caves"]}, True, []):  # TriviaQA's and BoolQ's: no answer could be right
        (tmp_path / "objects.jsonl").write_text(json.dumps({"question": "Does it?", "answer": answer}) + "\n")
        with pytest.raises(UserError, match="objects.jsonl:1: \"answer\" must be text, such as yes, or a list"):
            load_tasks("search", "test", None, 0, *[str(tmp_path / "objects.jsonl")] * 2, {"corpus": str(tmp_path)})
    env = envs.with_options(Search, {"corpus": str(tmp_path)})()
    env.reset(**task)
    with pytest.raises(UserError, match="cannot answer"):
        env._expert()  # not the question as its own answer
    with pytest.raises(UserError, match="give --env_options corpus=PATH"):
        load_tasks("search", "test", None, 0, *options)
    with pytest.raises(UserError, match="none.jsonl: no such file or folder"):
        load_tasks("search", "test", None, 0, *options, {"corpus": str(tmp_path / "none.jsonl")})
    with pytest.raises(UserError, match="--tasks questions.jsonl"):
        load_tasks("search", "test", None, 0, env_options={"corpus": str(tmp_path)})


# ----------------------------------------------------------------------------------------------------------- the agents
def pasting(env, seen):
    """Search for the question, then answer with all that the tool said."""
    if len(seen) == 1:
        return [{"name": "search", "arguments": {"query": seen[0]}}]
    return [{"name": "answer", "arguments": {"answer": seen[-1]}}]


def naming(env, seen):
    """Answer with the title of the first document that was found."""
    turn = pasting(env, seen)
    if turn[0]["name"] == "answer":
        turn[0]["arguments"]["answer"] = seen[-1].partition("]")[0][1:]
    return turn


@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_solves_every_task_and_others_earn_next_to_nothing(level):
    tasks = LEVELS[level]._tasks("test", 60, seed=0)
    assert play(LEVELS[level], expert, tasks) == (1.0, 1.0)
    for agent in (silent, repeating, at_random, pasting, naming):
        reward, solved = play(LEVELS[level], agent, tasks)
        assert reward < 0.1 and solved < 0.1, agent


def test_a_noisy_expert_is_wrong_where_it_confuses_relations():
    tasks = [{**task, "noise": 0.6, "noise_seed": i} for i, task in enumerate(Search._tasks("train", 300, seed=0))]
    assert 0.35 < play(Search, expert, tasks)[1] < 0.6


def test_tasks_are_a_function_of_their_arguments_and_share_no_archive():
    train, test = Search._tasks("train", 300, seed=0), Search._tasks("test", 300, seed=0)
    assert train == Search._tasks("train", 300, seed=0) != Search._tasks("train", 300, seed=1)
    assert not {task["archive"] for task in train} & {task["archive"] for task in test}
    assert not {task["question"] for task in train} & {task["question"] for task in test}
    assert len({task["archive"] for task in train}) > 290  # many archives, so that none is learned by heart


@pytest.mark.parametrize("level, tasks_hash, episodes_hash", [(1, "0bba19ce4bd6568f", "b601439b3b0a08b0"), (2, "e0e0c4d2edddffe7", "0e3d7da6b9cff6ac"), (3, "7631c89a530d5f31", "bb7c47cb6ff03238")])
def test_tasks_and_episodes_are_the_same_to_the_byte(level, tasks_hash, episodes_hash):
    """Their words are read from envs/search.json: a run that was made before finds its tasks again."""
    tasks = load_tasks("search", "train", 40, 3, env_options={"level": level})
    assert hashlib.sha256(json.dumps(tasks).encode()).hexdigest()[:16] == tasks_hash
    shown = []
    for task in tasks[:10]:
        env = envs.with_options(envs.load("search"), {"level": level})()
        shown.append(env.reset(**{key: value for key, value in task.items() if key != "env"}))
        while isinstance(calls := env._expert(), list) and calls:
            shown += [str(call) + str(getattr(env, call["name"])(**call["arguments"])) for call in calls]
            if getattr(env, "done", False):
                break
        shown.append(env.get_reward())
    assert hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16] == episodes_hash
