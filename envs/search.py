"""Questions that need two or three documents: "what is the home of the founder of Project Alder?"

An archive is a corpus of people, towns, projects and dates, drawn from its number: another archive
has other facts, so that nothing can be learned by heart. The tools search it by BM25 and open its
documents. The answer is compared with the right one as in SQuAD (Rajpurkar et al. 2016,
arXiv:1606.05250): exact match and F1 over words, each half of the reward. Only what the model gives
to `answer` counts. Nothing is paid for an answer of many more words than the right one, so that
pasting what a tool said earns nothing.

    level 1    2 hops, 8 documents in telegraphic style, whose names are numbers
    level 2    2 hops, 22 documents in sentences      level 3    3 hops, 36 documents
               (the environment search_hard)

Your own documents are read with --env_options corpus=PATH: a folder of .txt and .md files, or a
.jsonl file of rows {"title", "text"}. Questions on them come from --dataset, in rows
{"question", "answer"} whose answer is a text, or a list of texts that are all right.
"""
import math
import random
import re
import string
import textwrap
import zlib
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path

from experiment.data import read_rows, read_text
from experiment.errors import UserError

RESULTS, SHOWN = 3, 100  # documents that a search returns, characters that it shows of each
MAX_DOCUMENT = 1200  # characters; a longer text becomes several documents
K1, B = 1.2, 0.75  # of BM25, as in Lucene
TITLE_WEIGHT = 2  # a word of the title counts as so many
EXTRA_WORDS = 3  # an answer may have these more than twice the words of the right one
ASKED_PER_ARCHIVE = 10
# Kind -> relation -> the kind of its value, and two sentences that state it.
FACTS = {
    "project": {
        "founder": ("person", "{} was founded by {}.", "The founder of {} is {}."),
        "engineer": ("person", "{} was built by {}.", "The engineer of {} is {}."),
        "site": ("town", "{} stands in {}.", "The site of {} is {}."),
        "day": ("date", "{} began on {}.", "The first day of {} was {}."),
    },
    "person": {
        "senior": ("person", "{} reports to {}.", "The senior of {} is {}."),
        "junior": ("person", "{} trains {}.", "The junior of {} is {}."),
        "home": ("town", "{} lives in {}.", "The home of {} is {}."),
        "day": ("date", "{} was born on {}.", "The birthday of {} is {}."),
    },
    "town": {
        "founder": ("person", "{} was founded by {}.", "The founder of {} is {}."),
        "day": ("date", "{} was founded on {}.", "The day of {} is {}."),
    },
}
SIZES = {1: {"project": 2, "person": 6}, 2: {"project": 6, "person": 12, "town": 4},
         3: {"project": 10, "person": 20, "town": 6}}
HOPS = {1: 2, 2: 2, 3: 3}
FIRST_NAMES = ("Ada Bruno Clara Dario Edith Felix Greta Hugo Irma Jonas Karin Leo Mara Nils Olga "
               "Paul").split()
SYLLABLES = "al bren cor dun el far gim hol ing kes lor mar nev os pel quin ros sten tor wick".split()
MONTHS = ("January February March April May June July August September October November "
          "December").split()


# -------------------------------------------------------------------------------------- the corpus
class Corpus:
    """Documents, title -> text, and their index for BM25 (Robertson and Zaragoza 2009)."""

    def __init__(self, documents: dict[str, str]):
        self.documents = documents
        self.titles = {title.lower(): title for title in documents}
        self.postings = defaultdict(dict)  # word -> title -> how often it is in the document
        self.lengths = {}
        for title, text in documents.items():
            words = words_of(title) * TITLE_WEIGHT + words_of(text)
            self.lengths[title] = len(words)
            for word, count in Counter(words).items():
                self.postings[word][title] = count
        self.mean_length = sum(self.lengths.values()) / len(documents)

    def best(self, query: str) -> list[str]:
        """Return the titles of the documents that fit the query best, at most RESULTS."""
        scores = Counter()
        for word in set(words_of(query)):
            found = self.postings.get(word, {})
            # Lucene adds 1 inside the logarithm: a word that most documents have counts little,
            # and never less than nothing.
            idf = math.log(1 + (len(self.documents) - len(found) + 0.5) / (len(found) + 0.5))
            for title, count in found.items():
                norm = 1 - B + B * self.lengths[title] / self.mean_length
                scores[title] += idf * count * (K1 + 1) / (count + K1 * norm)
        return sorted(scores, key=lambda title: (-scores[title], title))[:RESULTS]


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@lru_cache(4)
def read_corpus(path: str) -> Corpus:
    """Return the documents of a folder of .txt and .md files, or of a .jsonl file."""
    if Path(path).is_dir():
        files = sorted(f for f in Path(path).rglob("*") if f.suffix in (".txt", ".md"))
        rows = [{"title": str(f.relative_to(path)), "text": read_text(f)} for f in files]
    else:
        rows = [row for _, row in read_rows(path)]
    documents = {}
    for number, row in enumerate(rows, 1):
        text = str(row.get("text") or "")
        title = str(row.get("title") or number)
        for start in range(0, len(text), MAX_DOCUMENT):
            part = f" ({start // MAX_DOCUMENT + 1})" if start else ""
            documents[title + part] = text[start:start + MAX_DOCUMENT]
    if not documents:
        raise UserError(f'{path}: no documents; give a folder of .txt or .md files, or a .jsonl '
                        'file of rows {"title", "text"}')
    return Corpus(documents)


# ------------------------------------------------------------------------------- the synthetic one
@lru_cache(256)
def read_archive(archive: int, level: int) -> Corpus:
    """Return the documents of an archive, one for each entity."""
    rng = random.Random(archive)
    documents = {}
    for (kind, entity), values in draw_facts(archive, level).items():
        sentences = []
        for relation, (_, value) in values.items():
            form = f"{{}} {relation} {{}}." if level == 1 else rng.choice(FACTS[kind][relation][1:])
            sentences.append(form.format(entity, value))
        documents[entity] = " ".join(rng.sample(sentences, len(sentences)))
    return Corpus(documents)


def draw_facts(archive: int, level: int) -> dict:
    """Return (kind, entity) -> relation -> (kind of the value, value), a function of the number."""
    rng = random.Random(archive)
    used = set()
    names = {kind: [draw_name(kind, level, rng, used) for _ in range(size)]
             for kind, size in SIZES[level].items()}
    facts = {}
    for kind in names:
        for entity in names[kind]:
            values = facts[kind, entity] = {}
            for relation, (of, *_) in FACTS[kind].items():
                if of == "date":
                    values[relation] = of, draw_name(of, level, rng, used)
                elif of in names:
                    values[relation] = of, rng.choice([n for n in names[of] if n != entity])
    return facts


def draw_name(kind: str, level: int, rng, used: set) -> str:
    """Return a name or a date that is not in `used`, and add it there."""
    word = "".join(rng.choices(SYLLABLES, k=2)).capitalize()
    if level == 1:
        name = str(rng.randint(10, 99))
    elif kind == "date":
        name = f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1950, 2019)}"
    else:
        name = {"project": "Project {}", "person": f"{rng.choice(FIRST_NAMES)} {{}}",
                "town": "{}burg"}[kind].format(word)
    if name in used:
        return draw_name(kind, level, rng, used)
    used.add(name)
    return name


def draw_question(archive: int, level: int, facts: dict, rng) -> dict:
    """Return a task whose answer is HOPS documents away, and not in the first of them."""
    while True:
        path = [rng.choice(list(facts))]
        phrase = path[0][1]
        while path[-1] in facts and len(path) <= HOPS[level]:
            relation, value = rng.choice(list(facts[path[-1]].items()))
            path.append(value)
            phrase = f"the {relation} of {phrase}"
        is_direct = path[-1] in facts[path[0]].values()
        if len(path) == HOPS[level] + 1 == len(set(path)) and not is_direct:
            return {"question": f"Archive {archive}: what is {phrase}?", "answer": path[-1][1],
                    "archive": archive, "level": level}


def told(entity: str, text: str) -> dict:
    """Return relation -> value, as the sentences of a text tell it of an entity."""
    values = {}
    for facts in FACTS.values():
        for relation, (_, *forms) in facts.items():
            for form in (*forms, f"{{}} {relation} {{}}."):
                pattern = re.escape(form[:-1]).replace(r"\{\}", "{}")
                if match := re.search(pattern.format(re.escape(entity), r"([\w ]+)\."), text):
                    values[relation] = match[1]
    return values


# ------------------------------------------------------------------------------------- the answer
def normalized(text: str) -> list[str]:
    """Return the words of an answer as SQuAD compares them: no case, punctuation or articles."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def f1(words: list[str], right: list[str]) -> float:
    """Return SQuAD's F1 of two lists of words, or 0 where `words` are many more."""
    common = (Counter(words) & Counter(right)).total()
    if not common or len(words) > 2 * len(right) + EXTRA_WORDS:
        return 0.0
    return 2 * common / (len(words) + len(right))


class Search:
    """Answer a question about an archive that only its tools show."""

    system_prompt = "Find the answer with the tools. Answer in as few words as possible."
    max_turns = 10
    limits = {"max_new_tokens": 128, "max_tokens": 2048, "max_tool_tokens": 1536}
    levels = (1,)

    def reset(self, question: str, answer: str | list, archive: int | None = None, level: int = 1,
              corpus: str | None = None, noise: float = 0.0, noise_seed: int = 0, **_) -> str:
        """Begin with a question on an archive, or on the documents of one's own in `corpus`.

        With probability `noise` the scripted expert takes another fact of a document for the one
        that it needs. `noise_seed` decides when.
        """
        if (corpus is None) == (archive is None):
            raise UserError("a question needs documents: --env_options corpus=PATH, and questions "
                            "on them by --dataset path/to/questions.jsonl")
        self._corpus = read_corpus(corpus) if corpus else read_archive(archive, level)
        self._right = [normalized(a) for a in ([answer] if isinstance(answer, str) else answer)]
        self._reward_parts = {"exact": 0.0, "f1": 0.0}
        self.done = False
        # Of the expert: the relations to follow, the entities so far, the text that it has read.
        *relations, entity = question.rpartition("what is ")[2].rstrip("?").split(" of ")
        self._relations = [relation.removeprefix("the ") for relation in reversed(relations)]
        self._path = [entity]
        self._read = ""
        self._asked = set()
        self._noise = noise
        self._rng = random.Random(f"{noise_seed} {question}")
        return question

    def search(self, query: str) -> str:
        """Search the documents. Returns the titles and the first words of those that fit best.

        Args:
            query: a few words, such as a name
        """
        lines = []
        for title in self._corpus.best(query):
            text = self._corpus.documents[title]
            lines.append(f"{title}: {textwrap.shorten(text, SHOWN)}")
        return self._note("search", query, "\n".join(lines) or "nothing found")

    def open_document(self, title: str) -> str:
        """Return the text of a document.

        Args:
            title: its title, as a search gave it
        """
        known = self._corpus.titles.get(title.strip().lower())
        if known is None:
            raise ValueError(f"no document {title!r:.60}")
        return self._note("open_document", title, self._corpus.documents[known])

    def answer(self, answer: str) -> str:
        """Give the final answer.

        Args:
            answer: the answer alone, such as a name or a date
        """
        if self.done:
            return "error: the episode is over"
        self.done = True
        words = normalized(answer)
        self._reward_parts = {"exact": 0.5 * (words in self._right),
                              "f1": 0.5 * max(f1(words, right) for right in self._right)}
        return "right" if self._check() else "wrong"

    def get_reward(self) -> float:
        return sum(self._reward_parts.values())

    def _check(self) -> bool:
        return self._reward_parts["exact"] > 0

    def _reply(self, text: str) -> str:
        return "Use the tools. Give the answer with answer."

    # ---------------------------------------------------------------------- the scripted expert
    def _note(self, tool: str, asked: str, text: str) -> str:
        """Note for the expert what a tool was asked and answered. Return the answer."""
        self._asked.add((tool, asked))
        self._read += f"\n{text}"
        return text

    def _expert(self) -> list[dict]:
        """Return the next call: look up one entity after another, then answer with the last.

        It reads the question's "the A of the B of C" from its end, and of the documents what the
        tools said. It knows the synthetic archives alone.
        """
        while len(self._path) <= len(self._relations) and not self.done:
            entity = self._path[-1]
            values = told(entity, self._read)
            relation = self._relations[len(self._path) - 1]
            if relation not in values and ("search", entity) not in self._asked:
                return [{"name": "search", "arguments": {"query": entity}}]
            if relation not in values and ("open_document", entity) not in self._asked:
                return [{"name": "open_document", "arguments": {"title": entity}}]
            is_last = len(self._path) == len(self._relations)
            others = [value for key, value in values.items()
                      if key != relation and (is_last or key != "day")] or [entity]
            is_wrong = relation not in values or self._rng.random() < self._noise
            self._path.append(self._rng.choice(others) if is_wrong else values[relation])
        if self.done:
            return []
        return [{"name": "answer", "arguments": {"answer": self._path[-1]}}]

    # ------------------------------------------------------------------------------- the tasks
    @staticmethod
    def _row(row: dict) -> dict:
        """Return a row of --dataset, or raise ValueError if it is no question with its answer."""
        texts = [row["question"], *([row["answer"]] if isinstance(row["answer"], str) else row["answer"])]
        if not all(isinstance(text, str) and text.strip() for text in texts) or len(texts) < 2:
            raise ValueError('"question" must be text, and "answer" text or a list of texts')
        return row

    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        """Return n questions. A tenth of the archives, by hash, is the test split."""
        rng = random.Random(f"{split} {seed}")
        tasks = {}
        while len(tasks) < (10_000 if n is None else n):
            archive = rng.randrange(100_000, 1_000_000)
            if (zlib.crc32(str(archive).encode()) % 10 == 0) == (split == "test"):
                level = rng.choice(cls.levels)
                facts = draw_facts(archive, level)
                for _ in range(ASKED_PER_ARCHIVE):
                    task = draw_question(archive, level, facts, rng)
                    tasks[task["question"]] = task
        return list(tasks.values())[:n]


class SearchHard(Search):
    """Answer questions over two or three documents of prose."""

    levels = (2, 3)
