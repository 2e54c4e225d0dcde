"""What reconcile reads and writes: Observed, Plan, phases and conditions."""
