"""Documents that are searched by BM25 (Robertson and Zaragoza 2009), and reading one's own."""
import math
import re
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path
from unicodedata import normalize

from envs.answers import spaced
from envs.task_files import read_rows
from core.data import read_text
from core.config import UserError

# A document has at most 1200 characters. A longer text becomes several, cut at white space.
PIECE = re.compile(r"\S.{0,1199}(?!\S)|\S.{1199}", re.DOTALL)
K1, B, TITLE_WEIGHT = 1.2, 0.75, 3  # of BM25 as in Lucene; a word of the title counts thrice


class Corpus:
    """Documents, title -> text, and their index."""

    def __init__(self, documents: dict[str, str]):
        self.documents = documents
        self.counts = defaultdict(Counter)  # word -> title -> how often the document has it
        self.lengths = {}  # title -> words
        for title, text in documents.items():
            words = words_of(title) * TITLE_WEIGHT + words_of(text)
            self.lengths[title] = len(words)
            for word in words:
                self.counts[word][title] += 1

    def best(self, query: str, n: int) -> list[str]:
        """Return the titles of the n documents that fit the query best, the best first."""
        mean_length = sum(self.lengths.values()) / len(self.lengths)
        scores = Counter()
        for word in sorted(set(words_of(query)) & self.counts.keys()):
            counts = self.counts[word]
            # Lucene's, with N + 1: a word that most documents have never counts against them.
            idf = math.log((len(self.lengths) + 1) / (len(counts) + 0.5))
            for title, count in counts.items():
                norm = 1 - B + B * self.lengths[title] / mean_length
                scores[title] += idf * count * (K1 + 1) / (count + K1 * norm)
        return [title for title, _ in scores.most_common(n)]


def words_of(text: str) -> list[str]:
    """Return the words of a text without case and accents, however it is encoded."""
    text = normalize("NFKD", spaced(text))
    return re.findall(r"[^\W_]+", re.sub(r"[\u0300-\u036f]", "", text))


def files_of(path: str) -> list[Path]:
    """Return the .txt and .md files of a folder, or else the path itself."""
    if not Path(path).is_dir():
        return [Path(path)]
    # A Mac writes ._notes.txt beside notes.txt on foreign disks.
    files = Path(path).rglob("[!.]*")
    return sorted(file for file in files if file.suffix.lower() in (".txt", ".md"))


@lru_cache(4)
def read_corpus(path: str) -> Corpus:
    """Return the documents of a folder of .txt and .md files, or of a .jsonl file."""
    if not path:
        raise UserError("questions need documents: give --env_options corpus=PATH")
    if not Path(path).exists():
        raise UserError(f"corpus={path}: no such file or folder")
    if Path(path).is_dir():
        # A Mac stores the ü of a name as u and ¨.
        texts = {normalize("NFC", str(file.relative_to(path))): read_text(file)
                 for file in files_of(path)}
    else:
        texts = {}
        for line, row in read_rows(path):
            title = str(row.get("title") or row.get("_id", line))
            # The passages of a title are one document.
            texts[title] = f"{texts.get(title, '')}\n{row.get('text') or ''}".strip()
    documents = {}
    for title, text in texts.items():
        pieces = PIECE.findall(text)
        for number, piece in enumerate(pieces, 1):
            # So the title says where a document goes on, in what a search shows, too.
            if len(pieces) > 1:
                documents[f"{title} ({number} of {len(pieces)})"] = piece
            else:
                documents[title] = piece
    if not documents:
        raise UserError(f'{path}: no documents; give a folder of .txt or .md files, or a .jsonl '
                        'file of rows {"title", "text"}')
    return Corpus(documents)
