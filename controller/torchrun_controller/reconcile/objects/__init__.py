"""The bodies of what is created: Job, Service, claims, sync, setup and serve pods."""
