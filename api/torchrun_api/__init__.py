"""What users write and read: the torchrun.ai/v1alpha1 types and the slices of core kinds beside them."""
