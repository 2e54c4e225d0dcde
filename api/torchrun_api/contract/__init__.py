"""What programs in pods agree on with the controller and the plugin."""
