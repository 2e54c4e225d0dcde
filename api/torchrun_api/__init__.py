"""What users write and read: torchrun.ai/v1alpha1, and slices of the core kinds beside it."""
