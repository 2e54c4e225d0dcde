"""One job: the steps in their order, and the status and events that tell of them."""
