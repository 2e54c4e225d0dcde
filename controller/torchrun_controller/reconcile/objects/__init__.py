"""Bodies of Jobs, Services, PVCs, NetworkPolicies, and of sync, setup and serve pods."""
