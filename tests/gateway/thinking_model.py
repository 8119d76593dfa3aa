"""A model that thinks in tags and calls tools as Hermes does, and what it says in tests."""

from __future__ import annotations

from dataclasses import replace

from gateway.model_text import ChatTemplate, ModelText
from gateway.output.style import OutputStyle, ReasoningParser, ToolCallParser

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = '{"city": "Bern \\"{"}'
CALL = f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>'
OUTPUT = f'<think>the fox</think>I ask.{CALL}<tool_call>{{"name": "now"}}</tool_call>'
TEMPLATE = (
    "{{ enable_thinking }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.reasoning_content %}#{{ m.reasoning_content }}{% endif %}"
    "{% for c in m.tool_calls %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }})"
    "{% endfor %}{% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{{ tools | length if tools else 0 }}"
)


def thinking_model(text: ModelText) -> ModelText:
    """Returns the model with the same tokenizer."""
    style = OutputStyle(ToolCallParser.HERMES, ReasoningParser.QWEN3)
    return replace(text, style=style, template=ChatTemplate(TEMPLATE, {}))
