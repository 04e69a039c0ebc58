"""qkv: attention, and everything built on it."""
