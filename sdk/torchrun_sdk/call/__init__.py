"""One call: its gang and the connections to it, its log, its state and its results."""
