"""Speculation: proposers draft, a verifier judges, control says how far. The tables of what there is stand here."""
