"""The HTTP side. It knows the engine by `engine/client.py` only, and does templates and tokenising."""
