"""The parser of tool calls, under the name that it had before core/."""
from core.tool_calls import after_thought, check_call, parse_tool_calls

__all__ = ["after_thought", "check_call", "parse_tool_calls"]
