"""Archives that nobody has checked yet: each member is checked, each byte is counted."""
