"""Text that must be of a form: JSON of a schema, a regular expression, a choice, a grammar, structural tags.

`request.py` reads what a request asks for, `grammar.py` writes it for llguidance, `compiler.py` compiles and keeps it,
`trial.py` compiles it elsewhere first, `guide.py` follows one text, `processor.py` masks logits and cuts drafts by it.
Only `grammar.py`, `compiler.py` and the trial's process need llguidance; it is imported when a request asks.
"""
