"""The tags of the family's answers, as text; those of calls begin with NAMESPACE."""

from __future__ import annotations

THINK_BEGIN = "<mm:think>"
THINK_END = "</mm:think>"
NAMESPACE = "]<]minimax[>["
BLOCK_BEGIN = NAMESPACE + "<tool_call>"
BLOCK_END = NAMESPACE + "</tool_call>"
INVOKE_BEGIN = NAMESPACE + '<invoke name="'
INVOKE_END = NAMESPACE + "</invoke>"
