"""The controller: an event-driven reconciler on a raw watch loop."""
