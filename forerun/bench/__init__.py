"""Load generator, datasets, reports: what `forerun bench` is made of. It speaks to any server of OpenAI's form.

Not for engines in themselves: `offline.py` alone runs one, and imports it when it does.
"""
