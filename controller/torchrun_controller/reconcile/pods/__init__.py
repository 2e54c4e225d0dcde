"""What child Jobs, pods and nodes report: their states, why they wait, which nodes are lost."""
