"""Input and output of reconcile: Observed and Plan, phases and conditions."""
