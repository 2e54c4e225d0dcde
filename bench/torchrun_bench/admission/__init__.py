"""What each mechanism of admission is worth, in a simulated cluster on three traces."""
