"""The effect of each mechanism of admission, in a simulated cluster on three traces."""
