"""`python -m qkv.cli`: the command line without an installed script."""

from qkv.cli import main

main()
