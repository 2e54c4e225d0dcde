"""The API group torchrun.ai/v1alpha1, and the fields of core kinds that the project reads."""
