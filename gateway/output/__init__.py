"""What a model means by its output: text, reasoning and tool calls, told apart as it streams."""
