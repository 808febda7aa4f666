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
--dataset, in rows {"question", "answer"}; an answer is a text, or a list of texts that are right.
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

# Kind, relation, kind of the value, and one of the three sentences that may state the fact.
FACTS = """
project founder person {} was founded by {}.
project engineer person {} was built by {}.
project site town {} stands in {}.
project day date {} began on {}.
person senior person {} reports to {}.
person junior person {} trains {}.
person home town {} lives in {}.
person day date {} was born on {}.
town founder person {} owes its name to {}.
town day date {} was founded on {}.
"""
FACTS = [line.split(maxsplit=3) for line in FACTS.strip().splitlines()]
SIZES = {1: {"project": 2, "person": 6}, 2: {"project": 6, "person": 12, "town": 4},
         3: {"project": 10, "person": 20, "town": 6}}
HOPS = {1: 2, 2: 2, 3: 3}
QUESTIONS = 20  # that are asked of one archive
FIRST_NAMES = "Ada Bruno Clara Dario Edith Felix Greta Hugo Irma Jonas Karin Leo Mara Nils".split()
SYLLABLES = "al bren cor dun el far gim hol ing kes lor mar nev os pel quin ros sten tor".split()
MONTHS = "January February March April May June July August September October".split()

MAX_SHOWN = 100  # characters that a search shows of a document
MAX_DOCUMENT = 1200  # characters; a longer text becomes several documents
MAX_EXTRA = 3  # an answer of more words than these and twice the right ones earns nothing
K1, B, TITLE_WEIGHT = 1.2, 0.75, 2  # of BM25 as in Lucene; a word of the title counts twice


# -------------------------------------------------------------------------------------- the corpus
class Corpus:
    """Documents, title -> text, and their index for BM25 (Robertson and Zaragoza 2009)."""

    def __init__(self, documents: dict[str, str]):
        self.documents = documents
        self.counts = defaultdict(dict)  # word -> title -> how often it is in the document
        self.lengths = {}
        for title, text in documents.items():
            words = words_of(title) * TITLE_WEIGHT + words_of(text)
            self.lengths[title] = len(words)
            for word, count in Counter(words).items():
                self.counts[word][title] = count
        self.mean_length = sum(self.lengths.values()) / len(documents)

    def best(self, query: str, n: int) -> list[str]:
        """Return the titles of the n documents that fit the query best, the best first."""
        scores = Counter()
        for word in set(words_of(query)):
            counts = self.counts.get(word, {})
            # Lucene adds the 1, so that a word that most documents have never counts against them.
            idf = math.log(1 + (len(self.documents) - len(counts) + 0.5) / (len(counts) + 0.5))
            for title, count in counts.items():
                norm = 1 - B + B * self.lengths[title] / self.mean_length
                scores[title] += idf * count * (K1 + 1) / (count + K1 * norm)
        return sorted(scores, key=lambda title: (-scores[title], title))[:n]


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@lru_cache(4)
def read_corpus(path: str) -> Corpus:
    """Return the documents of a folder of .txt and .md files, or of a .jsonl file."""
    if Path(path).is_dir():
        files = sorted(f for f in Path(path).rglob("*") if f.suffix in (".txt", ".md"))
        texts = [(str(f.relative_to(path)), read_text(f)) for f in files]
    else:
        texts = [(row.get("title") or str(n), row.get("text", "")) for n, row in read_rows(path)]
    documents = {}
    for title, text in texts:
        for number, start in enumerate(range(0, len(text), MAX_DOCUMENT), 1):
            name = title if number == 1 else f"{title} ({number})"
            documents[name] = text[start:start + MAX_DOCUMENT]
    if not documents:
        raise UserError(f'{path}: no documents; give a folder of .txt or .md files, or a .jsonl '
                        'file of rows {"title", "text"}')
    return Corpus(documents)


# ------------------------------------------------------------------------- the synthetic archives
@lru_cache(256)
def read_archive(archive: str, level: int) -> Corpus:
    """Return the documents of an archive, one for each entity."""
    rng = random.Random(archive)
    names, facts = draw_facts(archive, level)
    documents = {}
    for kind in names:
        forms = forms_of(kind)
        for entity in names[kind]:
            sentences = []
            for relation, value in facts[entity].items():
                form = forms[relation][0] if level == 1 else rng.choice(forms[relation][1:])
                sentences.append(form.format(entity, value))
            documents[entity] = " ".join(rng.sample(sentences, len(sentences)))
    return Corpus(documents)


def forms_of(entity_kind: str) -> dict:
    """Return relation -> the three sentences that may state it, for entities of a kind."""
    return {relation: (f"{{}} {relation} {{}}.", sentence, f"The {relation} of {{}} is {{}}.")
            for kind, relation, _, sentence in FACTS if kind == entity_kind}


def draw_facts(archive: str, level: int) -> tuple[dict, dict]:
    """Return kind -> entities, and entity -> relation -> value, both drawn from the name."""
    rng = random.Random(archive)
    used = set()
    names = {kind: [draw_name(kind, level, rng, used) for _ in range(size)]
             for kind, size in SIZES[level].items()}
    facts = defaultdict(dict)
    for kind, relation, of, _ in FACTS:
        for entity in names.get(kind, []):
            if of == "date":
                facts[entity][relation] = draw_name(of, level, rng, used)
            elif of in names:
                others = [name for name in names[of] if name != entity]
                facts[entity][relation] = rng.choice(others)
    return names, facts


def draw_name(kind: str, level: int, rng, used: set) -> str:
    """Return a name or a date that is not in `used`, and add it there."""
    word = "".join(rng.choices(SYLLABLES, k=2)).capitalize()
    if level == 1:
        name = str(rng.randint(10, 99))
    elif kind == "date":
        name = f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1950, 2019)}"
    elif kind == "person":
        name = f"{rng.choice(FIRST_NAMES)} {word}"
    else:
        name = f"Project {word}" if kind == "project" else f"{word}burg"
    if name in used:
        return draw_name(kind, level, rng, used)
    used.add(name)
    return name


def draw_question(archive: str, level: int, facts: dict, rng) -> dict:
    """Return a task whose answer is HOPS documents away, and not in the first of them."""
    while True:
        path = [rng.choice(list(facts))]
        phrase = path[0]
        while path[-1] in facts and len(path) <= HOPS[level]:
            relation = rng.choice(list(facts[path[-1]]))
            path.append(facts[path[-1]][relation])
            phrase = f"the {relation} of {phrase}"
        is_direct = path[-1] in facts[path[0]].values()
        if len(path) == HOPS[level] + 1 == len(set(path)) and not is_direct:
            return {"question": f"Archive {archive}: what is {phrase}?", "answer": path[-1],
                    "archive": archive, "level": level}


# ------------------------------------------------------------------------------------- the answer
def normalized(text: str) -> list[str]:
    """Return the words of an answer as SQuAD compares them: no case, punctuation or articles."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def f1(words: list[str], right: list[str]) -> float:
    """Return SQuAD's F1 of two lists of words, or 0 where `words` are many more."""
    common = (Counter(words) & Counter(right)).total()
    if not common or len(words) > 2 * len(right) + MAX_EXTRA:
        return 0.0
    return 2 * common / (len(words) + len(right))


class Search:
    """Answer a question about documents that only the tools show."""

    system_prompt = "Find the answer with the tools."
    max_turns = 10
    limits = {"max_new_tokens": 128, "max_tokens": 2048, "max_tool_tokens": 1536}
    options = {"level": 1, "corpus": ""}

    def reset(self, question: str, answer: str | list, archive: str = "", level: int = 1,
              noise: float = 0.0, noise_seed: int = 0, **_) -> str:
        """Begin with a question on an archive, or on the documents of the option `corpus`.

        With probability `noise` the scripted expert takes another fact of a document for the one
        that it needs. `noise_seed` decides when.
        """
        path = self.options["corpus"]
        if bool(path) == bool(archive):
            raise UserError("a question needs its documents: give --env_options corpus=PATH, and "
                            "questions on them by --dataset questions.jsonl")
        self._corpus = read_corpus(path) if path else read_archive(archive, level)
        self._results = 1 if archive and level == 1 else 4  # of a search
        self._right = [normalized(text) for text in texts_of(answer)]
        self._reward_parts = {"exact": 0.0, "f1": 0.0}
        self.done = False
        # What the expert knows: the question's relations, the entities so far, what it has read.
        *relations, entity = question.rpartition("what is ")[2].rstrip("?").split(" of ")
        self._relations = [relation.removeprefix("the ") for relation in reversed(relations)]
        self._path = [entity]
        self._read = ""
        self._asked = set()
        self._noise = noise
        self._rng = random.Random(f"{noise_seed} {question}")
        return question

    # ------------------------------------------------------------------------------- the tools
    def search(self, query: str) -> str:
        """Search the documents. Returns the titles and the first words of those that fit best.

        Args:
            query: a few words, such as a name
        """
        lines = []
        for title in self._corpus.best(query, self._results):
            text = textwrap.shorten(self._corpus.documents[title], MAX_SHOWN)
            lines.append(f"{title}: {text}")
        return self._note("search", query, "\n".join(lines) or "nothing found")

    def open_document(self, title: str) -> str:
        """Return the text of a document.

        Args:
            title: its title, as a search gave it
        """
        if title not in self._corpus.documents:
            raise ValueError(f"no document {title!r:.60}")
        return self._note("open_document", title, self._corpus.documents[title])

    def answer(self, answer: str) -> str:
        """Give the final answer.

        Args:
            answer: the answer in as few words as possible, such as a name or a date
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
        return "Use the tools."

    # ---------------------------------------------------------------------- the scripted expert
    def _note(self, tool: str, asked: str, text: str) -> str:
        """Note for the expert what a tool was asked and answered. Return the answer."""
        self._asked.add((tool, asked))
        self._read += f"\n{text}"
        return text

    def _told(self, entity: str) -> dict:
        """Return relation -> value, as the sentences that were read tell it of an entity."""
        values = {}
        for kind in SIZES[3]:
            for relation, forms in forms_of(kind).items():
                for form in forms:
                    pattern = form[:-1].format(re.escape(entity), r"([\w ]+)\.")
                    if match := re.search(pattern, self._read):
                        values[relation] = match[1]
        return values

    def _expert(self) -> list[dict]:
        """Return the next call: look up one entity after another, then answer with the last.

        It reads the question, which says "the A of the B of C", from its end. It can do so in the
        synthetic archives alone.
        """
        if self.done:
            return []
        while len(self._path) <= len(self._relations):
            entity, relation = self._path[-1], self._relations[len(self._path) - 1]
            values = self._told(entity)
            for tool, argument in (("search", "query"), ("open_document", "title")):
                if relation not in values and (tool, entity) not in self._asked:
                    return [{"name": tool, "arguments": {argument: entity}}]
            # A wrong fact that is followed names an entity, which has a document.
            is_last = len(self._path) == len(self._relations)
            wrong = [value for name, value in values.items()
                     if name != relation and (is_last or name != "day")] or [entity]
            is_wrong = relation not in values or self._rng.random() < self._noise
            self._path.append(self._rng.choice(wrong) if is_wrong else values[relation])
        return [{"name": "answer", "arguments": {"answer": self._path[-1]}}]

    # ------------------------------------------------------------------------------- the tasks
    @staticmethod
    def _row(row: dict) -> dict:
        """Return a row of --dataset, or raise ValueError if it is no question with its answer."""
        texts = [row["question"], *texts_of(row["answer"])]
        if len(texts) < 2 or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError('"question" must be text, and "answer" text or a list of texts')
        return row

    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        """Return n questions. A tenth of the archives, by hash, is the test split."""
        rng = random.Random(f"{split} {seed}")
        level = cls.options["level"]
        tasks = {}
        while len(tasks) < (10_000 if n is None else n):
            archive = "".join(rng.choices(string.ascii_lowercase, k=4))
            if (zlib.crc32(archive.encode()) % 10 == 0) == (split == "test"):
                facts = draw_facts(archive, level)[1]
                for _ in range(QUESTIONS):
                    task = draw_question(archive, level, facts, rng)
                    tasks[task["question"]] = task
        return list(tasks.values())[:n]


def texts_of(answer) -> list:
    return answer if isinstance(answer, list) else [answer]
