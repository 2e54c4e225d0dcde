"""The git source: one commit, fetched without a checkout."""
