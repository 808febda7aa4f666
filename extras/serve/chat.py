"""What `python agent.py` does: chat with the agent or the plain model, play tasks, or serve.

    python agent.py --model_path runs/grpo                 each line is a task for the agent
    python agent.py --model_path path/to/model             a plain chat: no run, no environment
    python agent.py --model_path runs/grpo --env none      the same, whatever the run played
    python agent.py --model_path runs/grpo --num_tasks 64 --output traces.jsonl
    python agent.py --model_path runs/grpo --serve         OpenAI's API

Core's own command plays the same tasks, and its chat is a shorter one. `agent` is the module
agent.py, which this layer does not import: it is given, as `load_model` is.
"""
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from pathlib import Path

import envs
from core.chat import Chat
from core.config import UserError, auto, flag, mix, printable
from envs.task_files import note_untrained
from envs.transcripts import message_lines, transcript
from core.data import pass_at_k, summarise, to_json
from core.engine import Row
from core.run import set_aside
from envs.tasks import tasks_for
from extras.serve.settings import check, check_served, sampled_as_its_own, settle
from extras.stop import Stop
from lora import merged

WIDTH = 79  # of the lines that introduce an environment


def extended(config_class, agent, load_model):
    """Return the Config and the command of agent.py with what this layer adds."""
    @dataclass(kw_only=True)
    class Config(config_class):
        heading = "agent"
        temperature: float | None = auto(
            1.0, "of sampling; 0: the most likely token; a plain chat: the model's own, or 0.7")
        system_prompt: str | None = flag(None, "with --env none: how every conversation begins")
        top_k: int = flag(0, "sample among the k most likely tokens; 0: all", low=0)
        top_p: float = flag(1.0, "sample among the most likely tokens of this total probability",
                            above=0, high=1)
        serve: bool = flag(False, "answer requests over HTTP instead (extras/serve)")
        host: str = flag("127.0.0.1", "with --serve: the address to listen at")
        port: int = flag(8000, "with --serve: the port; 0: a free one", low=0, high=65535)
        token: str | None = flag(None, "with --serve: what clients must send as their API key")

    return Config, partial(run, agent, load_model)


def serve(config, model, tokenizer, begin, make_engine):
    """Answer requests until a signal ends the process.

    Args:
        config: of agent.py.
        begin: called with the text of a task, it returns the `agent.Episode` that plays it.
        make_engine: as in core/engine.py.
    """
    try:
        # FastAPI is not installed everywhere.
        from extras.serve.server import run as answer
    except ImportError as error:
        raise UserError(f'--serve needs "pip install -U fastapi uvicorn" ({error})') from None
    answer(config, model, tokenizer, begin, make_engine)


def run(agent, load_model, config):
    """Do what a Config asks for."""
    check_served(config)
    is_free = config.temperature is None  # no flag says it
    config = settle(config)
    check(config)
    tasks = tasks_for(config, config.split, config.num_tasks or 100)
    if config.env and not tasks:
        raise UserError(f"--split test: no row of {config.dataset:.200} is held out; give "
                        "--eval_dataset FILE, or --split train")
    if len(tasks) < config.num_tasks:
        print(f"note: --num_tasks {config.num_tasks}, but --split {config.split} has "
              f"{len(tasks)} tasks")
        if config.dataset and not (config.split == "test" and config.eval_dataset):
            print("      --split test --eval_dataset FILE plays a whole file")
    model, tokenizer = load(config, load_model)
    if is_free and not config.env:
        config = sampled_as_its_own(config, model)
    if config.num_tasks:
        play_tasks(config, agent, model, tokenizer, tasks)
        return
    with agent.sessions(envs.limits_of(config)) as new_session:
        visit = Visit(config, agent, model, tokenizer, new_session)
        if config.serve:
            serve(config, model, tokenizer, visit.begin, agent.make_engine)
            return
        try:
            if config.env:
                chat_with_agent(config, agent, model, visit, tasks)
            else:
                chat_with_model(config, agent, model, tokenizer)
        except Stop:
            # Ctrl-C leaves the cursor in the middle of a line.
            print()
            raise


def load(config, load_model):
    """Load the model and print what it is. Return it and its tokenizer."""
    print(f"loading {config.model_path}", flush=True)
    # A server exchanges adapters: the one that it is started with stays beside its weights.
    model, tokenizer = load_model(config.model_path, dtype=config.dtype, device=config.device,
                                  train=False, merge=False if config.serve else None)
    print(f"{model.num_parameters() / 1e6:,.1f} million weights, {str(model.dtype)[6:]}, on "
          f"{model.device.type}")
    note_untrained(config)
    return model, tokenizer


def play_tasks(config, agent, model, tokenizer, tasks: list[dict]):
    """Play tasks, print the first episodes and the summary, and write each episode as it ends."""
    output = Path(config.output).absolute() if config.output else None
    options = agent.rollout_options(config)
    options["engine"] = partial(agent.make_engine, top_k=config.top_k, top_p=config.top_p)
    pay = options.pop("pay")
    ended = []

    class Kept(options.pop("agent")):
        def leave(self):
            """Write the episode. Paid at once, it is whole whatever ends the program early."""
            if pay:
                pay([self])
            ended.append(self)
            if output:
                with open(output, "a", encoding="utf-8") as file:
                    file.write(to_json(self.trajectory.to_json()))

    if output and output.exists():
        print(f"{output}: the file that was there is now {set_aside(output)}")
    total = len(tasks) * config.group_size
    print(f"playing {total} episodes of {config.env} ({config.split}): at most "
          f"{config.max_tokens} tokens each, {config.max_new_tokens} a turn", flush=True)
    try:
        # With step -1 the same seed gives the episodes of a run's evaluation.
        episodes = agent.rollout(model, tokenizer, config.env, tasks, config.group_size, step=-1,
                                 agent=Kept, **options)
    finally:
        if output:
            print(f"{len(ended)} of {total} episodes were finished and are kept in {output}")
    for t in episodes[:8]:
        print(transcript(t.to_json()), end="\n\n")
    for name, value in (summarise(episodes) | pass_at_k(episodes)).items():
        print(f"{name:24}{value:>10.6g}")


# ---------------------------------------------------------------------------- with the agent
class Visit:
    """A person's episodes, of tasks that are typed or shown."""

    def __init__(self, config, agent, model, tokenizer, new_session):
        self.agent, self.new_session = agent, new_session
        self.options, self.limits = envs.options_of(config), envs.limits_of(config)
        self.name = config.env
        self.cls = self.chat = None
        if config.env:
            classes, chats = envs.load_environments(
                tokenizer, config.env, model.generation_config, self.options)
            self.cls, self.chat = classes[config.env], chats[config.env]

    @property
    def reads(self) -> bool:
        """True if the environment makes a task of a text."""
        return hasattr(self.cls, "_from_text")

    def begin(self, text: str):
        """Return the episode of a text. Raises ValueError if the environment cannot read it."""
        if not self.reads:
            raise ValueError(f"--env {self.name} makes no task of a text (_from_text)")
        return self.episode(self.cls._from_text(text) | envs.taken(self.cls, self.options))

    def episode(self, task: dict):
        """Return the episode of a task."""
        session = self.new_session(self.name, self.cls, task)
        return self.agent.Episode(session, self.chat, self.limits, "visit")


def chat_with_agent(config, agent, model, visit: Visit, tasks: list[dict]):
    """Play an episode for every line that the user types, and print its turns as they come."""
    introduce(config, visit)
    with merged(model):
        engine = engine_for(config, agent, model, visit.chat)
        for number, task in enumerate(cycle(tasks)):
            episode = visit.episode(task)
            text = ask(f"Task: {printable(question_of(episode))}\n")
            if text is None:
                return
            try:
                if text:
                    episode = asked_instead(visit, episode, text)
            except ValueError as error:
                print(f"[{printable(str(error))}]")
                continue
            if episode.can_take_turn:
                row = Row(episode.trajectory.token_ids, seed=mix(config.seed, number),
                          limit=episode.turn_budget)
                show(agent.play_turns(engine, {row: episode}), episode)
            print(f"[{how_it_ended(episode)}]")


def sampling(config) -> str:
    """Return how the turns of a chat are sampled, in words."""
    cuts = {"top_k": config.top_k, "top_p": config.top_p}
    words = [f"{name} {value:g}" for name, value in cuts.items() if value not in (0, 1)]
    return ", ".join([f"temperature {config.temperature:g}", *words])


def introduce(config, visit: Visit):
    """Print what the user of a chat should know of the environment."""
    reads = "Press Enter for the task that is shown, or type one of your own."
    if not visit.reads:
        reads = ("Press Enter for the task that is shown. Other text is asked in its place, and "
                 "the tools still work on the task.")
    source = f" of {config.dataset}" if config.dataset else ""
    for text in (f"Environment {visit.name}: {', '.join(visit.chat.tools)}.",
                 f"{config.model_path} plays {config.split} tasks{source} at {sampling(config)}.",
                 reads,
                 "Every task is an episode of its own: nothing is remembered. Ctrl-D ends."):
        print(textwrap.fill(text, WIDTH, break_on_hyphens=False))


def asked_instead(visit: Visit, episode, text: str):
    """Return the episode of what the user typed in place of the task that is shown.

    Raises ValueError if the environment cannot read it.
    """
    if visit.reads:
        episode = visit.begin(text)
        if question_of(episode) != text:
            print(f"Task: {printable(question_of(episode))}")
    else:
        first = episode.trajectory.messages[:-1]
        episode.set_prompt([*first, {"role": "user", "content": text}])
    return episode


def question_of(episode) -> str:
    return episode.trajectory.messages[-1]["content"]


def show(turns, episode):
    """Print the messages of the episode as they come."""
    messages = episode.trajectory.messages
    shown = len(messages)
    for _ in turns:
        for line in message_lines(messages[shown:]):
            print(line, flush=True)
        shown = len(messages)


def how_it_ended(episode) -> str:
    """Return the end of the episode in words."""
    t = episode.trajectory
    if t.stop_reason == "error":
        return t.info["error"]
    if not t.stop_reason:
        limit = episode.limits.max_tokens
        return f"the prompt has {len(t.token_ids)} tokens, --max_tokens is {limit}"
    if None in episode.session.task.values():
        # A question whose right answer nobody gave is neither solved nor failed.
        return t.stop_reason
    return f"{t.stop_reason}; success {t.info['success']}; reward {t.reward:.2f}"


# ---------------------------------------------------------------------------- with the model
def chat_with_model(config, agent, model, tokenizer):
    """Hold conversations with the model alone, and print its answers as they are sampled."""
    try:
        chat = Chat(tokenizer, [], model.generation_config)
    except ValueError as error:
        raise UserError(str(error)) from error
    print(textwrap.fill(f"A plain chat with {config.model_path}, without an environment, at "
                        f"{sampling(config)}. The conversation is remembered, and an empty line "
                        "begins a new one. Ctrl-D ends.", WIDTH, break_on_hyphens=False))
    with merged(model):
        engine = engine_for(config, agent, model, chat)
        for number in count():
            if not hold_conversation(config, chat, engine, mix(config.seed, number)):
                return


def hold_conversation(config, chat: Chat, engine, seed: int) -> bool:
    """Hold a conversation, which stays in the engine's cache, until an empty line.

    Returns False at the end of input.
    """
    row = None
    length = 0  # of the conversation, in tokens
    while text := ask():
        if row:
            ids = chat.reply(text, row.turn[-1])
        else:
            messages = [{"role": "user", "content": text}]
            if config.system_prompt:
                messages.insert(0, {"role": "system", "content": config.system_prompt})
            ids = chat.prompt(messages)
        total = length + len(ids)
        if total >= config.max_tokens:
            print(f"[that makes {total} tokens, --max_tokens is {config.max_tokens}; an empty line "
                  "begins a new conversation]")
            continue
        limit = min(config.max_new_tokens, config.max_tokens - total)
        if row:
            engine.extend(row, ids, limit)
        else:
            row = Row(ids, seed=seed, limit=limit)
            engine.add([row])
        print("Assistant: ", end="", flush=True)
        for piece in pieces(engine, chat, row):
            print(printable(piece), end="", flush=True)
        length = total + len(row.turn)
        print()
        if row.turn[-1] not in chat.stop_ids:
            print(f"[cut after {len(row.turn)} tokens; --max_new_tokens, --max_tokens]")
    if row:
        engine.release(row)
    return text is not None


def pieces(engine, chat: Chat, row: Row):
    """Yield the text of a turn piece by piece, as it is sampled."""
    shown = text = ""
    while engine.busy:
        engine.step()
        text = chat.text(row.turn)
        # The last character may still lack some of its bytes.
        whole = text.rstrip("\ufffd")
        yield whole[len(shown):]
        shown = whole
    yield text[len(shown):]


# ------------------------------------------------------------------------------ what both use
def ask(shown: str = "") -> str | None:
    """Print some lines and return what the user types then, or None at the end of input."""
    print(f"\n{shown}", end="")
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  with it, input() edits a line
    try:
        text = input("You: ").strip()
    except EOFError:
        print()
        return None
    if not sys.stdin.isatty():
        # Nobody has seen it on a terminal.
        print(printable(text))
    return text


def engine_for(config, agent, model, chat: Chat):
    """Return an engine for one conversation at a time."""
    return agent.make_engine(model, slots=1, tokens=config.max_tokens, stop_ids=chat.end_ids,
                             temperature=config.temperature, top_k=config.top_k,
                             top_p=config.top_p)
