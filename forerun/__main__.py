"""`python -m forerun` is the command line."""

from forerun.cli import main

main()
