"""``python -m slipstream`` is the command line."""

from slipstream.cli import main

main()
