"""On which nodes a gang runs or waits: what the nodes say, and what the scheduler says."""
