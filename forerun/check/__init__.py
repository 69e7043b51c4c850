"""The self-test of speculation: whether it keeps its promise on a user's own models. Knows the engine, no command."""
