"""What `cpu_peers.py` and `quality.py` are made of: each side in its own module, and what both share."""
