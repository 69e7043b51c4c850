"""What models write around their answers, and how it is told from the answer: reasoning and tool calls."""
