"""What users write, and the parts of core kinds that the code reads."""
