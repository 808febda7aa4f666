"""What is said of an unknown flag: what was meant by it, and what does its work here."""
import re
from itertools import chain
from pathlib import Path

from core.config import UserError, nearest
from extras.presence import has

SYNONYMS = {}  # a flag, or a layer -> what others call it, or the flags that need it
for line in Path(__file__).with_name("synonyms.txt").read_text("utf-8").splitlines():
    meant, _, words = line.partition(": ")
    SYNONYMS[meant] = words.split()
NOT_HERE = {}  # a flag of another library, or flag=value of it -> the sentence that answers it
for entry in re.split(r"\n(?! )", Path(__file__).with_name("not_here.txt").read_text("utf-8")):
    names, _, sentence = entry.partition(":")
    NOT_HERE |= dict.fromkeys(names.split(), " ".join(sentence.split()))


def refuse_names(unknown, known):
    """Raise UserError for names of a YAML file, {name: (place, value)}, that no flag has.

    Ignored is a layer's flag that asks for nothing, of a run made where the layer was.
    """
    ignored = set(chain(*SYNONYMS.values()))
    refused = [name for name, (_, value) in unknown.items() if f"{name}={value}" not in ignored]
    if refused:
        place, _ = unknown[refused[0]]
        raise _unknown(refused, known, f"{place}: ")


def unexpected(words, known, argv):
    """Return the UserError for what no flag takes. The word after an unknown flag is its value."""
    unknown = []
    for before, word in zip(["", *words], words):
        if re.match("--.", word):
            unknown.append(word[2:].partition("=")[0].replace("-", "_"))
        elif not before.startswith("--"):
            return UserError(f"unexpected argument {word}; {_written(word, known, argv)}")
    return _unknown(unknown, known, prefix="--")


def _written(word, known, argv):
    """Return how the word should be written that no flag takes."""
    if word.endswith((".yaml", ".yml", ".toml")):
        return f"a file of options is YAML, of lines `name: value`: --config {word}"
    # Hydra's spelling: actor.path=x, +name=x.
    path, equals, value = word.partition("=")
    name = re.split("[.+]", path)[-1]
    if equals and name in known:
        return f"options are written --{name} {value}"
    place = argv.index(word)
    if place < 2 or not re.match("--.", argv[place - 2]):
        return "options are written --name value"
    option = argv[place - 2][2:].replace("-", "_")
    meant = "" if option in known else f"; --{option}: {_answer(option, known, '--')}"
    return f"several values are written a,b{meant}"


def _unknown(names, known, place="", prefix=""):
    """Return the UserError for unknown flags, which answers all of them."""
    names = dict.fromkeys(names)
    answers = {}  # flags with the same answer stand together
    for name in names:
        answers.setdefault(_answer(name, known, prefix), []).append(prefix + name)
    if len(names) > 1:
        words = "; ".join(f"{', '.join(same)} ({answer})" for answer, same in answers.items())
        return UserError(f"{place}unknown options: {words}")
    [(answer, [name])] = answers.items()
    if answer.startswith("needs "):
        return UserError(f"{place}{name} {answer}")
    return UserError(f"{place}unknown option {name}; {answer}")


def _answer(name, known, prefix):
    """Return what is said of an unknown flag: what was meant, by meaning or else by spelling."""
    name = name.removeprefix("no_")
    for meant, synonyms in SYNONYMS.items():
        layer = meant.removeprefix("extras/")
        if name not in [word.partition("=")[0] for word in synonyms]:
            continue
        if layer != meant and not (name in NOT_HERE and has(layer)):
            return f"needs {meant}, which is not here"
        if meant.split()[0] in known:
            return f"did you mean {prefix}{meant}?"
    return NOT_HERE.get(name) or nearest(name, known, prefix)
