"""Writing to a brief whose demands can be counted: words to use, length, person, tense, and more.

The reward is the mean of the brief's parts, each from 0 to 1, times the share of sentences that
look like sentences, so that a list of words earns nothing, times how near the length is to its
range (count / least, or most / count), so that one good sentence earns little:

    words       the share of the words to use that are used
    person      of the personal pronouns, the share in the person that is asked for
    tense       of the verbs that follow a subject pronoun, the share in the tense that is asked
                for; where they are fewer than half the sentences, the missing ones count as wrong
    trigrams    the share of trigrams that are distinct
    acrostic    level 2: the share of its letters with which the sentences begin, in order
    rhyme       level 3: the share of sentences whose last word ends in the letters asked for, each
                with another word

A sentence begins with a capital, ends in . ! or ?, and has 5 to 30 words, of which a quarter to 7
tenths are function words. It has no word twice in a row and no determiner before a function word,
and its last word is no determiner or preposition. Success means that all of this is met.

What this cannot see is meaning and most of grammar: nonsense in the form of sentences gets full
marks, the tense of a verb after a noun is not read, and a rhyme is one by its letters. A judge of
one's own is given with --rewards module:function. --env_options level=2 chooses the level. The
lists of words are in writing.json.
"""
import json
import random
import re
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

from core.data import split_of

LISTS = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
PRONOUNS = LISTS["pronouns"]  # of the first, second and third person
DETERMINERS = LISTS["determiners"]
PREPOSITIONS = LISTS["prepositions"]
FUNCTION_WORDS = {*chain(*PRONOUNS.values()), *DETERMINERS, *PREPOSITIONS, *LISTS["function_words"]}
# Past forms that do not end in -ed: did is that of didn't, too, and d of I'd.
PAST = LISTS["past"]
SAME = LISTS["same"]  # present and past
PRESENT = LISTS["present"]  # though they end in -ed
SUBJECTS = LISTS["subjects"]
# What is no verb after one of SUBJECTS.
OTHERS = DETERMINERS + PREPOSITIONS + LISTS["conjunctions"]
ADVERBS = LISTS["adverbs"]  # without -ly
# What the expert writes with. A verb stands in the first and second person, the third, the past.
NOUNS, VERBS = LISTS["nouns"], LISTS["verbs"]
PLACES, OPENERS = LISTS["places"], LISTS["openers"]
RHYMES = LISTS["rhymes"]
SUBJECT_OF = LISTS["subject_of"]  # of the expert's sentences, by the person


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", re.sub("n['\u2019]t", "", text.lower()))


def is_sentence(text: str) -> bool:
    """Return whether a text has the form of a sentence."""
    words = words_of(text)
    if not (5 <= len(words) <= 30 and text[0].isupper() and text[-1] in ".!?"):
        return False
    share = sum(word in FUNCTION_WORDS for word in words) / len(words)
    is_broken = any(word == after or word in DETERMINERS and after in FUNCTION_WORDS
                    for word, after in pairwise(words))
    return 0.25 <= share <= 0.7 and not is_broken and words[-1] not in DETERMINERS + PREPOSITIONS


def tense_share(words: list[str], tense: str, sentences: int) -> float:
    """Return the share of verbs after a subject pronoun, adverbs left out, in the tense."""
    words = [word for word in words if not word.endswith("ly") and word not in ADVERBS]
    verbs = right = 0
    for subject, verb in pairwise(words):
        if subject in SUBJECTS and verb not in OTHERS:
            is_past = verb in PAST or verb.endswith("ed") and verb not in PRESENT
            verbs += 1
            right += verb in SAME or is_past == (tense == "past")
    return right / max(verbs, sentences / 2)


class Writing:
    """Write a short text that meets a brief."""

    system_prompt = "Write the text with the tools. Say when it is finished."
    max_turns = 8
    limits = {"max_new_tokens": 384, "max_tokens": 2048}
    options = {"level": 1}
    option_types = {"level": Literal[1, 2, 3]}

    def reset(self, words: list, min_words: int, max_words: int, person: str, tense: str,
              acrostic: str = "", rhyme: str = "", noise: float = 0.0, noise_seed: int = 0,
              **_) -> str:
        """Begin with the demands of a brief: at least one word; "" demands no acrostic or rhyme.

        With probability `noise` a sentence of the scripted expert leaves out the word that it
        should use. `noise_seed` decides which.
        """
        self._words, self._range = words, (min_words, max_words)
        self._person, self._tense = person, tense
        self._acrostic, self._rhyme = acrostic, rhyme
        self._text = ""
        self._outlined = False
        self._noise = noise
        self._rng = random.Random(f"{noise_seed} {words}")
        brief = (f"Write {min_words} to {max_words} words in the {person} person and the {tense} "
                 f"tense. Use {', '.join(words)}. Repeat no three words in a row.")
        if acrostic:
            brief += f" The first letters of the sentences spell {acrostic}."
        if rhyme:
            brief += f" Every sentence ends in another word in -{rhyme}."
        return brief

    # ------------------------------------------------------------------------------- the tools
    def brainstorm_ideas(self, letters: str) -> str:
        """Return words and phrases that begin or end in some letters.

        Args:
            letters: the letters, such as b or ight
        """
        ideas = [idea for idea in NOUNS + OPENERS + sum(RHYMES.values(), [])
                 if idea.lower().startswith(letters.lower()) or idea.endswith(letters)]
        return ", ".join(ideas) or "none"

    def create_outline(self, sentences: int) -> str:
        """Return which first letter and which word each sentence could have.

        Args:
            sentences: how many sentences the text will have
        """
        self._outlined = True
        lines = []
        for i in range(min(sentences, 20)):
            lines.append(f"{i + 1}. {self._acrostic[i:i + 1]} {' '.join(self._words[i:i + 1])}")
        return "\n".join(lines)

    def write_paragraph(self, text: str) -> str:
        """Append a paragraph to the text. Returns how the text meets the brief.

        Args:
            text: whole sentences
        """
        self._text = f"{self._text} {text}".strip()
        return self._review()

    def edit_content(self, old: str, new: str) -> str:
        """Replace a passage of the text. Returns how the text meets the brief.

        Args:
            old: the passage, exactly as it stands in the text
            new: what to put in its place
        """
        if not old or old not in self._text:
            raise ValueError("the text has no such passage")
        self._text = self._text.replace(old, new, 1).strip()
        return self._review()

    # ----------------------------------------------------------------------------- the reward
    def _score(self) -> tuple[float, dict]:
        """Return what all parts are multiplied by, and the parts, all from 0 to 1."""
        words = words_of(self._text)
        sentences = re.split(r"(?<=[.!?])\s+", self._text)
        least, most = self._range
        near = min(1.0, len(words) / least, most / max(len(words), 1))
        factor = near * sum(map(is_sentence, sentences)) / len(sentences)
        trigrams = list(zip(words, words[1:], words[2:]))
        pronouns = sum(map(words.count, sum(PRONOUNS.values(), [])))
        own = sum(map(words.count, PRONOUNS[self._person]))
        wanted = set(words_of(" ".join(self._words)))
        parts = {
            "words": len(wanted & set(words)) / len(wanted),
            "person": own / max(pronouns, 1),
            "tense": tense_share(words, self._tense, len(sentences)),
            "trigrams": len(set(trigrams)) / max(len(trigrams), 1),
        }
        if self._acrostic:
            pairs = zip(self._acrostic, sentences)
            right = sum(sentence.startswith(letter) for letter, sentence in pairs)
            parts["acrostic"] = right / max(len(self._acrostic), len(sentences))
        if self._rhyme:
            last = {(words_of(sentence) or [""])[-1] for sentence in sentences}
            parts["rhyme"] = sum(word.endswith(self._rhyme) for word in last) / len(sentences)
        return factor, parts

    def _review(self) -> str:
        factor, parts = self._score()
        marks = [f"{name} {part:.2f}" for name, part in {"form": factor, **parts}.items()]
        return f"{len(words_of(self._text))} words; {', '.join(marks)}"

    @property
    def _reward_parts(self) -> dict:
        factor, parts = self._score()
        return {name: factor * part / len(parts) for name, part in parts.items()}

    def get_reward(self) -> float:
        return sum(self._reward_parts.values())

    def _check(self) -> bool:
        factor, parts = self._score()
        return min(factor, *parts.values()) == 1.0

    def _reply(self, text: str) -> str | None:
        return None if self._text else "Write with write_paragraph."

    def _expert(self) -> list[dict] | str:
        """Return the outline, then a text of one sentence per 10 words, then an answer."""
        if self._text:
            return "It is finished."
        count = len(self._acrostic) or sum(self._range) // 20
        if not self._outlined:
            return [{"name": "create_outline", "arguments": {"sentences": count}}]
        rng = self._rng
        openers, places = rng.sample(OPENERS, count), rng.sample(PLACES, count)
        if self._acrostic:
            by_letter = {opener[0]: opener for opener in OPENERS}
            openers = [by_letter[letter] for letter in self._acrostic]
        if self._rhyme:
            places = [f"in the {word}" for word in RHYMES[self._rhyme]]
        form = int(self._person == "third")
        if self._tense == "past":
            form = 2
        others = [noun for noun in NOUNS if noun not in self._words]
        sentences = []
        for i, verb in enumerate(rng.sample(VERBS, count)):
            is_spare = i >= len(self._words) or rng.random() < self._noise
            noun = others[i] if is_spare else self._words[i]
            action = f"{SUBJECT_OF[self._person]} {verb[form]} the {noun}"
            sentences.append(f"{openers[i]} {action} {places[i]}.")
        return [{"name": "write_paragraph", "arguments": {"text": " ".join(sentences)}}]

    # ------------------------------------------------------------------------------- the tasks
    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        """Return n briefs. A tenth of the choices of words, by hash, is the test split."""
        rng = random.Random(f"{split} {seed}")
        level = cls.options["level"]
        tasks = []
        while len(tasks) < (n or 10_000):
            words = sorted(rng.sample(NOUNS, 4))
            if split_of(" ".join(words)) == split:
                acrostic = rhyme = ""
                if level == 2:
                    acrostic = rng.choice(LISTS["acrostics"])
                sentences = len(acrostic) or rng.randint(4, 6)
                person, tense = rng.choice(list(PRONOUNS)), rng.choice(["past", "present"])
                if level == 3:
                    rhyme = rng.choice(list(RHYMES))
                tasks.append({"words": words, "min_words": 8 * sentences,
                              "max_words": 12 * sentences, "person": person, "tense": tense,
                              "acrostic": acrostic, "rhyme": rhyme})
        return tasks
