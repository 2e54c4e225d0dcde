"""One module for each command: its flags, its help and what it does."""
