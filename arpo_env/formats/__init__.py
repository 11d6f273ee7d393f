"""Call formats: the text of one turn -> tool calls, a final answer, or what was wrong; and how results are shown to the policy.

Two formats stand side by side:

* :class:`Tags`, the ARPO paper's: ``<think>..</think>``, one tag a tool (``<search>..</search>``), ``<result>..</result>`` around what the tool gave,
  ``<answer>..</answer>`` around the final answer. A turn ends at the first closing tag, so it holds one call or one answer.
* :class:`Hermes`, the JSON format of Hermes and Qwen models: ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``, several in a turn.

Only the text that the policy wrote in this turn is parsed, never the prompt and never a tool's text. Parsing is total: every string gives calls, an
answer, or errors in words for the model; it never raises. Thoughts are not searched for calls or answers.
"""

from arpo_env.formats.base import CallFormat, ParsedTurn, ToolCall, boxed
from arpo_env.formats.hermes import Hermes
from arpo_env.formats.tags import Tags

__all__ = ["CallFormat", "Hermes", "ParsedTurn", "Tags", "ToolCall", "boxed"]
