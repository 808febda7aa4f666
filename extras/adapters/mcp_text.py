"""The tools of an MCP server (package mcp, version 2) as an environment.

    --env "mcp:python my_server.py" --dataset prompts.jsonl --rewards exact
    --env mcp:http://127.0.0.1:8000/mcp --dataset prompts.jsonl --rewards judge:rubric.md

A command is split as a shell splits it, and has no comma in it. Tasks are rows with a `prompt`. A
session belongs to one instance. It begins with the first call of an episode, which starts a command
anew, and ends with the episode's instance. What a tool says, an error too, is its answer to the
model. A server that does not start, or dies, ends the run. The options are

    tools=read+search     the tools that the model sees; all without it
    keep=true             an instance keeps its session in its next episode: for servers that
                          remember nothing between calls, and take long to start
"""
import asyncio
import atexit
import inspect
import os
import re
import shlex
import tempfile
import time
import weakref
from functools import cache
from keyword import iskeyword
from typing import Any

from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST

from core.config import EnvironmentFault, UserError, first_line
from envs.loop import run
from envs.prompts import Prompts

HINTS = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list,
         "object": dict}
# Names of the contract, and of any method. A tool or an argument with such a name gets another.
RESERVED = {"reset", "get_reward", "done", "reward", "options", "option_types", "limits",
            "max_turns", "system_prompt", "self"}
SECONDS = 30.0  # of a call
OPEN = set()  # sessions


class Session:
    """A session with a server. All but `end` runs in the loop of envs/loop.py."""

    def __init__(self, place: str):
        self.place = place
        self.stopped = asyncio.Event()
        # What a command writes to stderr.
        self.errors = tempfile.TemporaryFile("w+", errors="replace")

    async def open(self):
        """Connect. A client is left by the task that entered it, which therefore goes on."""
        self.loop = asyncio.get_running_loop()
        self.ready = self.loop.create_future()  # the client
        self.life = asyncio.create_task(self.live())
        await asyncio.wait([self.ready, self.life], return_when=asyncio.FIRST_COMPLETED)
        if not self.ready.done():
            raise self.fault(self.life.exception())

    async def live(self):
        OPEN.add(self)
        server = self.place
        if not server.startswith(("http://", "https://")):
            command, *arguments = shlex.split(server)
            parameters = StdioServerParameters(command=command, args=arguments, env=os.environ)
            server = stdio_client(parameters, errlog=self.errors)
        try:
            # Longer than SECONDS: extras/isolate has told the model by then, and nobody waits.
            async with Client(server, read_timeout_seconds=2 * SECONDS) as client:
                self.ready.set_result(client)
                await self.stopped.wait()
        except Exception:
            # Whoever calls a tool is told. To leave a server that is gone may fail, too.
            if not self.ready.done():
                raise
        finally:
            OPEN.discard(self)

    def end(self):
        """Let the session end. Any thread may call this, also while it collects garbage."""
        self.loop.call_soon_threadsafe(self.stopped.set)

    async def call(self, name: str, arguments: dict) -> str:
        """Return what a tool says. An error of the tool is a ValueError, which the model reads."""
        try:
            result = await self.ready.result().call_tool(name, arguments)
        except Exception as error:
            if not isinstance(error, MCPError) or error.code == CONNECTION_CLOSED:
                raise self.fault(error) from error
            # The model reads both. A session that is over, or a server that fails, it cannot help.
            kind = RuntimeError if error.code in (INVALID_REQUEST, INTERNAL_ERROR) else ValueError
            raise kind(str(error)) from None
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise ValueError(text)
        return text

    def fault(self, error) -> EnvironmentFault:
        """Return what to raise where the server is gone, with the last line that it wrote."""
        # Tasks of a group put their exceptions into another one.
        while nested := getattr(error, "exceptions", None):
            error = nested[0]
        self.errors.seek(0)
        wrote = self.errors.read().strip().splitlines()
        last = f"; the last that it wrote: {wrote[-1][:200]}" if wrote else ""
        return EnvironmentFault(f"mcp:{self.place}: no answer: {first_line(error)}{last}")


class KeptSession(Session):
    """A session that extras/isolate keeps for a later episode, because it can be closed."""

    close = Session.end


@atexit.register
def end_all():
    """End the sessions that are open when the program ends. Commands get two seconds."""
    deadline = time.monotonic() + 2
    for session in list(OPEN):
        session.end()
    while OPEN and time.monotonic() < deadline:
        time.sleep(0.02)


class Tools(Prompts):
    """An environment whose tools are a server's. `make` adds them to a subclass."""

    options = {"tools": "", "keep": False}
    limits = {"max_new_tokens": 512, "max_tokens": 4096, "max_tool_tokens": 2048,
              "tool_timeout": SECONDS}
    _place, _names = "", ()
    _session = None

    def __init_subclass__(cls):
        chosen = list(filter(None, cls.options["tools"].split("+")))
        if unknown := set(chosen).difference(cls._names):
            raise UserError(f"--env_options tools: mcp:{cls._place} has no "
                            f"{', '.join(sorted(unknown))}; it has {', '.join(cls._names)}")
        for name in set(cls._names).difference(chosen or cls._names):
            # It hides the method of the base class.
            setattr(cls, name, None)

    def reset(self, prompt: str | list[dict], answer: str | list = "", **_):
        """Add nothing to the row's prompt."""
        if self._session and not self.options["keep"]:
            self._session.end()
            self._session = None

    async def _call(self, name: str, arguments: dict) -> str:
        if not self._session:
            session = KeptSession(self._place) if self.options["keep"] else Session(self._place)
            await session.open()
            self._session = session
            weakref.finalize(self, session.end).atexit = False
        return await self._session.call(name, arguments)


@cache
def make(place: str) -> type:
    """Return the environment of the server at this address, or behind this command."""
    if not place.strip():
        raise UserError("--env mcp: a command or an address follows, as in mcp:python my_server.py")
    try:
        found, instructions = run(listed(place))
    except EnvironmentFault as error:
        raise UserError(f"--env {error}") from None
    methods = {name_of(tool.name): tool for tool in found}
    if not methods or len(methods) < len(found):
        names = ", ".join(tool.name for tool in found)
        raise UserError(f"--env mcp:{place}: its tools need names that differ: {names or 'none'}")
    return type("MCP", (Tools,), {
        **{name: method_of(name, tool) for name, tool in methods.items()},
        "system_prompt": instructions, "_place": place, "_names": tuple(methods)})


async def listed(place: str) -> tuple[list, str | None]:
    """Return the tools of a server, and its instructions."""
    session = Session(place)
    await session.open()
    client = session.ready.result()
    found, cursor, is_last = [], None, False
    try:
        while not is_last:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            is_last = not cursor
        return found, client.instructions
    except Exception as error:
        raise session.fault(error) from error
    finally:
        session.end()
        await asyncio.wait([session.life])


def name_of(name: str) -> str:
    """Return a name of a tool or an argument that is one of Python and none of the contract."""
    name = re.sub(r"\W", "_", name).lstrip("_")
    if not name.isidentifier():
        name = f"n{name}"
    return f"{name}_" if name in RESERVED or iskeyword(name) else name


def method_of(name: str, tool):
    """Return the method of a tool, with a signature, and the schema that the model reads."""
    parameters = untitled(tool.input_schema)
    given = parameters.get("properties", {})
    theirs = {name_of(key): key for key in given}
    required = [name_of(key) for key in parameters.get("required", ())]

    def method(self, **arguments):
        return self._call(tool.name, {theirs[key]: value for key, value in arguments.items()})

    kind = inspect.Parameter.KEYWORD_ONLY
    signature = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for key in theirs:
        default = inspect.Parameter.empty if key in required else None
        signature.append(inspect.Parameter(key, kind, default=default))
    method.__signature__ = inspect.Signature(signature)
    method.__annotations__ = {key: hint_of(given[theirs[key]]) for key in theirs}
    method.__doc__ = tool.description
    parameters |= {"type": "object", "required": required,
                   "properties": {key: given[theirs[key]] for key in theirs}}
    method.schema = {"type": "function", "function": {
        "name": name, "description": tool.description or name, "parameters": parameters}}
    return method


def hint_of(schema: dict):
    """Return the type that a value is checked for. The server checks the rest."""
    kind = schema.get("type")
    return HINTS.get(kind, Any) if isinstance(kind, str) else Any


def untitled(schema):
    """Return a JSON schema without its titles, which repeat the names, and without `$schema`."""
    if isinstance(schema, list):
        return [untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # A property that is called so holds a schema, no text.
    return {key: untitled(value) for key, value in schema.items()
            if key not in ("title", "$schema") or not isinstance(value, str)}
