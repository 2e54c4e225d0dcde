"""The state of child Jobs, pods and nodes: what runs, why pods wait, which nodes are lost."""
