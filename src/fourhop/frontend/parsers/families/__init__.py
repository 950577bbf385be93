"""The model families that are known: name → table. Grammars: vLLM 0.32's reasoning and tool parsers, and its names.

Families are grouped by how they write: `thinking`, `json_tools` (arguments as JSON), `tagged_tools` (in tags).
"""

from __future__ import annotations

from fourhop.frontend.parsers.families.json_tools import JSON_TOOLS
from fourhop.frontend.parsers.families.tagged_tools import TAGGED_TOOLS
from fourhop.frontend.parsers.families.thinking import THINKING
from fourhop.frontend.parsers.table import ReasoningFamily, ToolFamily

REASONING_FAMILIES: dict[str, ReasoningFamily | None] = {"none": None, **THINKING}
TOOL_FAMILIES: dict[str, ToolFamily | None] = {"none": None, **JSON_TOOLS, **TAGGED_TOOLS}
