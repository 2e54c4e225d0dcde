"""The state of child Jobs, pods and machines: what runs, why pods wait, which machines are lost."""
