"""From the types to CRDs and reference pages, for `make generate`."""
