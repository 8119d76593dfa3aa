"""Splits streamed output into text, reasoning and tool calls."""
