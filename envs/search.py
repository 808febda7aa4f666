"""Questions that need two or three documents: "what is the home of the founder of Project Alder?"

An archive is a corpus of people, towns, projects and dates, drawn from its name: another archive
has other facts, so that nothing can be learned by heart. The tools search it by BM25 and open its
documents. The answer is compared with the right one as in SQuAD (Rajpurkar et al. 2016,
arXiv:1606.05250): exact match and F1 over words, each half of the reward. Only what the model gives
to `answer` counts, and nothing is paid for an answer of many more words than the right one, so that
pasting what a tool said earns nothing.

    level 1    2 hops, 8 documents in telegraphic style, in which names and dates are numbers
    level 2    2 hops, 22 documents of prose
    level 3    3 hops, 36 documents of prose

--env_options level=2 chooses. With --env_options corpus=PATH the documents are your own: a folder
of .txt and .md files, or a .jsonl file of rows {"title", "text"}. Questions on them come from
--tasks, in rows {"question", "answer"}; the scripted expert cannot answer those.
"""
import json
import random
import re
import string
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path
from typing import Literal

from core.config import UserError
from core.data import split_of
from envs.answers import alternatives, normalized
from envs.corpus import Corpus, files_of, read_corpus
from envs.transcripts import beginning

CONTENT = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
# Relation, what has it, the kind of its value, a sentence that states it.
FACTS = CONTENT["facts"]
# Three ways to state a relation: the first is that of level 1.
FORMS = {}
for relation, _, _, sentence in FACTS:
    FORMS[relation] = (f"{relation}: {{1}}.", f"The {relation} of {{}} is {{}}.", sentence)
# The relation that a noisy expert takes for this one.
MISTAKEN = CONTENT["mistaken"]
# Level -> hops, questions asked of one archive, and how many it has of each of NAMES. With
# many questions on each, the tiny model memorizes archives instead of reading.
LEVELS = {1: (2, 1, (2, 6, 0)), 2: (2, 5, (6, 12, 4)), 3: (3, 10, (10, 20, 6))}
NAMES = CONTENT["names"]
SYLLABLES = CONTENT["syllables"]
WORDS = [first.capitalize() + second for first in SYLLABLES for second in SYLLABLES]
MONTHS = CONTENT["months"]

MAX_SHOWN = 100  # characters that a search shows of a document
MAX_EXTRA = 3  # an answer of more words than these and twice the right ones earns nothing


# ------------------------------------------------------------------------- the synthetic archives
def draw_facts(archive: str, level: int) -> dict[str, dict[str, str]]:
    """Return entity -> relation -> value, drawn from the name of the archive."""
    rng = random.Random(archive)
    if level == 1:
        words, forms = iter(rng.sample(range(10, 30), 20)), dict.fromkeys(NAMES, "{}")
    else:
        words, forms = iter(rng.sample(WORDS, 40)), NAMES
    names = {}
    for (kind, form), size in zip(forms.items(), LEVELS[level][2]):
        names[kind] = [form.format(next(words)) for _ in range(size)]
    facts = defaultdict(dict)
    for relation, kinds, value_kind, _ in rng.sample(FACTS, len(FACTS)):
        for entity in chain.from_iterable(names[kind] for kind in kinds.split(",")):
            if value_kind == "date":
                date = f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1950, 2019)}"
                if level == 1:
                    date = str(next(words))
                facts[entity][relation] = date
            elif others := [name for name in names[value_kind] if name != entity]:
                facts[entity][relation] = rng.choice(others)
    return facts


def read_archive(archive: str, level: int) -> Corpus:
    """Return a document for each entity, which states its facts in one of the FORMS."""
    rng = random.Random(f"{archive} documents")
    documents = {}
    for entity, values in draw_facts(archive, level).items():
        sentences = []
        for relation, value in values.items():
            number = 0
            if level > 1:
                number = rng.randint(1, 2)
            sentences.append(FORMS[relation][number].format(entity, value))
        documents[entity] = " ".join(sentences)
    return Corpus(documents)


def draw_question(archive: str, level: int, facts: dict, rng) -> dict:
    """Return a task whose answer is some documents away, and not in the first of them."""
    hops = LEVELS[level][0]
    while True:
        entity = phrase = rng.choice(list(facts))
        path = [entity]
        while path[-1] in facts and len(path) <= hops:
            relation, value = rng.choice(list(facts[path[-1]].items()))
            path.append(value)
            phrase = f"the {relation} of {phrase}"
        if len(set(path)) == hops + 1 and path[-1] not in facts[entity].values():
            return {"question": f"Archive {archive}: what is {phrase}?", "answer": path[-1],
                    "archive": archive, "level": level}


# ------------------------------------------------------------------------------------- the answer
def f1(words: list[str], right: list[str]) -> float:
    """Return SQuAD's F1 of two lists of words, or 0 where `words` are many more."""
    common = (Counter(words) & Counter(right)).total()
    if not common or len(words) > 2 * len(right) + MAX_EXTRA:
        return 0.0
    return 2 * common / (len(words) + len(right))


class Search:
    """Answer a question about documents that only the tools show."""

    system_prompt = "Find the answer with the tools."
    max_turns = 12
    limits = {"max_new_tokens": 128, "max_tokens": 2048, "max_tool_tokens": 1536}
    options = {"level": 1, "corpus": ""}
    option_types = {"level": Literal[1, 2, 3]}

    def reset(self, question: str, answer: str | list[str] | None, archive: str = "",
              level: int = 1, noise: float = 0.0, noise_seed: int = 0, **_) -> str:
        """Begin with a question on an archive, or on the documents of the option `corpus`.

        answer None is unknown, and no reward is paid.
        With probability `noise` the scripted expert takes a relation of the question for its like.
        `noise_seed` decides when.
        """
        self._corpus = self._documents(archive, level)
        self.max_turns = 12
        self._results = 4  # of a search
        if level == 1 and archive:
            self.max_turns = 4
            self._results = 1
        self._question = question
        self._right = list(filter(None, map(normalized, alternatives(answer))))
        self._reward_parts = {"exact": 0.0, "f1": 0.0}
        self.done = False
        self._read = {}  # title -> what the tools have shown of the document
        rng = random.Random(f"{noise_seed} {question}")
        self._mistaken = {}
        for name, other in MISTAKEN.items():
            if rng.random() < noise:
                self._mistaken[name] = other
        return question

    def _state(self) -> str:
        """Return the titles of the documents of which the tools have shown something."""
        return "; ".join(sorted(self._read))

    # ------------------------------------------------------------------------------- the tools
    def search(self, query: str) -> str:
        """Search the documents. Returns the titles and the first words of those that fit best.

        Args:
            query: a few words, such as a name
        """
        lines = []
        for title in self._corpus.best(query, self._results):
            text = beginning(self._corpus.documents[title], MAX_SHOWN)
            self._read.setdefault(title, text)
            lines.append(f"[{title}] {text}")
        return "\n".join(lines) or "nothing found"

    def open_document(self, title: str) -> str:
        """Return the text of a document.

        Args:
            title: its title, as a search gave it
        """
        if title not in self._corpus.documents:
            raise ValueError(f"no document {title!r:.60}")
        self._read[title] = self._corpus.documents[title]
        return self._read[title]

    def answer(self, answer: str) -> str:
        """Give the final answer.

        Args:
            answer: the answer in as few words as possible, such as a name or a date
        """
        if self.done:
            return "error: the episode is over"
        self.done = True
        if not self._right:
            return "The right answer is not known."
        words = normalized(answer)
        self._reward_parts = {"exact": 0.5 * (words in self._right),
                              "f1": 0.5 * max(f1(words, right) for right in self._right)}
        return "right" if self._check() else "wrong"

    def get_reward(self) -> float:
        return sum(self._reward_parts.values())

    @classmethod
    def _documents(cls, archive: str, level: int) -> Corpus:
        if archive:
            return read_archive(archive, level)
        return read_corpus(cls.options["corpus"])

    @classmethod
    def _files(cls) -> list:
        return files_of(cls.options["corpus"]) if cls.options["corpus"] else []

    def _check(self) -> bool:
        return self._reward_parts["exact"] > 0

    def _reply(self, text: str) -> str:
        return "Use the tools."

    # ---------------------------------------------------------------------- the scripted expert
    def _expert(self) -> list[dict]:
        """Return the next call: look up one entity after another, then answer with the last.

        The question says "the A of the B of C": C is looked up first, then its B.
        """
        if self.done:
            return []
        if self.options["corpus"]:
            raise UserError("the scripted expert cannot answer questions on a corpus of your own")
        *relations, entity = self._question.rpartition("what is ")[2].rstrip("?").split(" of ")
        for relation in reversed(relations):
            relation = relation.removeprefix("the ")
            value = self._told(entity, self._mistaken.get(relation, relation))
            if value is None and entity not in self._read:
                return [{"name": "search", "arguments": {"query": entity}}]
            if value is None:
                return [{"name": "open_document", "arguments": {"title": entity}}]
            entity = value
        return [{"name": "answer", "arguments": {"answer": entity}}]

    def _told(self, entity: str, relation: str) -> str | None:
        """Return the value of a relation, if what was read of the entity's document states it."""
        for form in FORMS[relation]:
            pattern = form[:-1].format(re.escape(entity), r"([\w ]+)\.")
            if match := re.search(pattern, self._read.get(entity, "")):
                return match[1]
        return None

    # ------------------------------------------------------------------------------- the tasks
    @classmethod
    def _row(cls, row: dict) -> dict:
        """Return a row of --tasks. Raises UserError if there are no documents to search."""
        cls._documents(row.get("archive"), row.get("level", 1))
        if isinstance(row["answer"], dict | bool) or row["answer"] in ("", []):
            raise ValueError('"answer" must be text, such as yes, or a list of texts; a field of '
                             "an object is named by --fields answer=answer.aliases")
        return row

    @classmethod
    def _from_text(cls, text: str) -> dict:
        """Return the question that a person typed. It names an archive, or there is a corpus."""
        archive = ""
        named = re.match(r"Archive (\w+):", text)
        if named and not cls.options["corpus"]:
            archive = named[1]
        return cls._row({"question": text, "answer": None, "archive": archive,
                         "level": cls.options["level"]})

    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        """Return n questions. A tenth of the archives, by hash, is the test split."""
        rng = random.Random(f"{split} {seed}")
        level = cls.options["level"]
        if cls.options["corpus"]:
            raise UserError("corpus: give questions on it with --tasks questions.jsonl")
        tasks = []
        while len(tasks) < (n or 10_000):
            archive = "".join(rng.choices(string.ascii_lowercase, k=4))
            if split_of(archive) == split:
                facts = draw_facts(archive, level)
                for _ in range(LEVELS[level][1]):
                    tasks.append(draw_question(archive, level, facts, rng))
        return tasks[:n]
