"""Anthropic's interface: messages."""
