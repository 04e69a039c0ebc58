"""Damaged and hostile files: each must be read, or refused in one line; see `python -m tests.fuzz --help`."""
