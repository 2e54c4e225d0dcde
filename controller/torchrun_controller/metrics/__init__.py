"""The metrics of the controller, and the generator of their reference page."""
