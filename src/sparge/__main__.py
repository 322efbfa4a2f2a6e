"""``python -m sparge``: the command."""

from sparge.cli import main

main()
