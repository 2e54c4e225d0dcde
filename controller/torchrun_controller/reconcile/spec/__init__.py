"""Queue and job resolved to what runs: sizes, policies, merges, contradictions."""
